"""Tests of storage: file system, snapshots, log, index, catalogues."""
