"""The controller of TrainingJobs: it makes one Indexed Job for each role, and keeps the evidence when they are gone."""
