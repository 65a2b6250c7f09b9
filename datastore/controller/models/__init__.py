"""The controller of Models, ModelVersions and ModelExports: it runs Jobs, and makes a volume of a version."""
