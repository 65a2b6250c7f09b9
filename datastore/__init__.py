"""Datastore: every kind of data storage as one local directory, on the laptop and on the cluster."""
