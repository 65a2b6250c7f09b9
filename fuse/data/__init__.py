"""The bytes of files: the cache of object versions, readahead, staging files, the planning of uploads."""
