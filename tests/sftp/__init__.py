"""Directories of a real SSH server on loopback, mounted over SFTP."""
