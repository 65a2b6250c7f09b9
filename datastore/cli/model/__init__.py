"""`datastore model ...`: one file for each verb."""
