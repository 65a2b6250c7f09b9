"""Datastore: every kind of data storage as one local directory, on the laptop and on the cluster.

Programs and notebooks submit training jobs with datastore.training; the command `datastore` does all the rest.
"""
