"""Sessions, queries and frames of Spark, whatever they are about: a local session,
small files, errors, frames that are kept.
"""
