"""The faces for programs on Twisted: everything on the reactor's thread, each call a
Deferred.
"""
