"""The controller of Models and ModelVersions: saves as Jobs, and versions as read-only volumes."""
