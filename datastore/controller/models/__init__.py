"""The controller of Models, ModelVersions and ModelExports: it runs Jobs, and shows versions as volumes."""
