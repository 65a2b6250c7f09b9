"""The API: manifests as typed models, and the contract between the parts that use them."""
