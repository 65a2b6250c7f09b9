"""The controller of TrainingJobs: one Indexed Job for each role, and what is kept when they are gone."""
