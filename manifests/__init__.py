"""Kubernetes manifests shipped as package data; crd.yaml is generated from datastore.api.datastore."""
