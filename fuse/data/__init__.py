"""Bytes: cached versions of objects, reading ahead, staging of changes, planning of uploads."""
