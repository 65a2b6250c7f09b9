"""`datastore job`: TrainingJobs. One file for each verb."""
