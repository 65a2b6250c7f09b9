"""A mount of an SSH server's directory (SFTP version 3) over asyncssh: the server is the file system, used by path."""
