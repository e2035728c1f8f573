"""Plans of letters: classes of letters, plans on disk and in reports, and plans of the
broker, which carries them out.
"""
