"""What every controller of ours is made of, whatever kind of object it looks after."""
