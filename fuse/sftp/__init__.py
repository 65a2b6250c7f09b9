"""A mounted directory of an SSH server (SFTP version 3) over asyncssh: the server is the file system, asked by path."""
