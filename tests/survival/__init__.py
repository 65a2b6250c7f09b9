"""What dies and what must not be lost: processes are killed under a load that checks every byte."""
