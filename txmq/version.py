"""The version of the package, for modules that must not import all of `txmq`."""

__version__ = "0.1.0"
