"""The resources that this project requests from the API server, and their URL paths. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from datastore.api.datastore import API_VERSION


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object as the API server addresses it."""

    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the URL path of an object or, without a name, of the collection. Also '/' is escaped in a name."""
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        space = f"/namespaces/{quote(namespace, safe='')}" if self.namespaced and namespace else ""
        one = f"/{quote(name, safe='')}" if name else ""
        return f"{root}{space}/{self.plural}{one}" + (f"/{subresource}" if subresource else "")


DATASTORES = Resource(API_VERSION, "datastores")
MODELS = Resource(API_VERSION, "models")
EXPORTS = Resource(API_VERSION, "modelexports")
SERVINGS = Resource(API_VERSION, "servings")
TRAININGJOBS = Resource(API_VERSION, "trainingjobs")
VERSIONS = Resource(API_VERSION, "modelversions")
CLAIMS = Resource("v1", "persistentvolumeclaims")
VOLUMES = Resource("v1", "persistentvolumes", namespaced=False)
SECRETS = Resource("v1", "secrets")
PODS = Resource("v1", "pods")
EVENTS = Resource("v1", "events")
NAMESPACES = Resource("v1", "namespaces", namespaced=False)
NODES = Resource("v1", "nodes", namespaced=False)
DEPLOYMENTS = Resource("apps/v1", "deployments")
AUTOSCALERS = Resource("autoscaling/v2", "horizontalpodautoscalers")
DAEMONSETS = Resource("apps/v1", "daemonsets")
DRIVERS = Resource("storage.k8s.io/v1", "csidrivers", namespaced=False)
DEFINITIONS = Resource("apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False)
JOBS = Resource("batch/v1", "jobs")
SERVICES = Resource("v1", "services")
STATEFULSETS = Resource("apps/v1", "statefulsets")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "networkpolicies")
CONFIGMAPS = Resource("v1", "configmaps")
LEASES = Resource("coordination.k8s.io/v1", "leases")
CLASSES = Resource("storage.k8s.io/v1", "storageclasses", namespaced=False)
BY_KIND = {
    "PersistentVolumeClaim": CLAIMS,
    "PersistentVolume": VOLUMES,
    "Datastore": DATASTORES,
    "Lease": LEASES,
    "Serving": SERVINGS,
    "Deployment": DEPLOYMENTS,
    "Service": SERVICES,
    "StatefulSet": STATEFULSETS,
    "NetworkPolicy": NETWORK_POLICIES,
    "HorizontalPodAutoscaler": AUTOSCALERS,
    "TrainingJob": TRAININGJOBS,
    "Job": JOBS,
    "Pod": PODS,
    "ConfigMap": CONFIGMAPS,
    "Secret": SECRETS,
    "Model": MODELS,
    "ModelVersion": VERSIONS,
    "ModelExport": EXPORTS,
}
