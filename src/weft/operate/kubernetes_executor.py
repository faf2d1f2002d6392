"""Starts each run as a Job of Kubernetes: `k8s://namespace?image=…&service-account=…`.

The Job makes one Pod, once (`backoffLimit: 0`, `restartPolicy: Never`): whether a run is tried again is decided by its
retry policy and the run log. The cluster and the credentials are those of the Pod that the scheduler runs in, else of
the user's kubeconfig.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

from weft.engine import config
from weft.errors import ConnectionFailedError, MissingExtraError, SettingsError, installing, listed
from weft.operate.executors import Dispatch

_OPTIONS = (
    *("image", "service-account", "env-from-secret", "cpu", "memory", "ttl-seconds", "deadline-seconds"),
    *("image-pull-policy", "command", "spark-executors", "spark-image"),
)
_EXAMPLE = "k8s://weft?image=registry.example.com/pipelines:1&service-account=weft"
_TIMEOUT_SECONDS = 10
LABEL = "weft.dev/pipeline"


@dataclass(frozen=True)
class KubernetesJob:
    """A Job that was made."""

    api: Any
    namespace: str
    name: str
    tells_end: ClassVar[bool] = True

    def ended(self) -> int | None:
        from kubernetes.client.exceptions import ApiException

        try:
            job = self.api.read_namespaced_job(self.name, self.namespace, _request_timeout=_TIMEOUT_SECONDS)
        except ApiException as error:
            if error.status == 404:  # removed after its time to live, or by a person: the run log has its outcome
                return 0
            raise
        if job.status.succeeded:
            return 0
        return 1 if job.status.failed else None


class KubernetesExecutor:
    """Starts runs as Jobs in a namespace."""

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        pairs = parse_qsl(split.query, keep_blank_values=True)
        for name, _ in pairs:
            if name not in _OPTIONS:
                hint = listed(name, _OPTIONS, f"It takes: {', '.join(_OPTIONS)}.")
                raise SettingsError(f"k8s:// takes no option {name!r}.", hint=hint)
        self.namespace, self.options = split.netloc, dict(pairs)
        self.secrets = [value for name, value in pairs if name == "env-from-secret"]
        if not self.namespace or split.path.strip("/") or not self.options.get("image"):
            raise SettingsError("k8s:// needs a namespace and an image.", hint=_EXAMPLE)
        for name in ("ttl-seconds", "deadline-seconds"):
            if not re.fullmatch("[0-9]{1,9}", self.options.get(name, "1")):
                raise SettingsError(f"{name} of k8s:// is a whole number of seconds.")
        if not re.fullmatch("[1-9][0-9]{0,5}", self.options.get("spark-executors", "1")):
            raise SettingsError("spark-executors of k8s:// is a whole number, at least 1.")
        if ("spark-executors" in self.options) != bool(self.options.get("spark-image")):
            # Executors are started by the entrypoint of Spark's own images, which an image of Weft does not have.
            raise SettingsError(
                "spark-executors of k8s:// needs spark-image, an image of Spark's own, and the other way round.",
                hint=f"{_EXAMPLE}&spark-executors=4&spark-image=registry.example.com/spark:1",
            )
        try:
            import kubernetes
        except ImportError as error:
            raise MissingExtraError(
                f"k8s:// needs the client of Kubernetes, which is not there: {error}.", hint=installing("executor-k8s")
            ) from error
        own = kubernetes.client.Configuration()
        # The client itself looks at this variable when it is imported, which may be too early.
        named = {"config_file": os.environ["KUBECONFIG"]} if os.environ.get("KUBECONFIG") else {}
        try:
            kubernetes.config.load_config(client_configuration=own, **named)  # type: ignore[no-untyped-call]
        except kubernetes.config.ConfigException as error:
            raise SettingsError(
                f"No cluster of Kubernetes is configured: {str(error).rstrip('.')}.",
                hint="Set KUBECONFIG, or run in a Pod.",
            ) from None
        self.api: Any = kubernetes.client.BatchV1Api(kubernetes.client.ApiClient(own))

    def start(self, dispatch: Dispatch) -> KubernetesJob:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        manifest = self.manifest(dispatch)
        try:
            self.api.create_namespaced_job(self.namespace, manifest, _request_timeout=_TIMEOUT_SECONDS)
        except ApiException as error:
            raise ConnectionFailedError(
                f"Kubernetes refused the Job of {dispatch.pipeline}: {error.status} {error.reason}: {_message(error)}"
            ) from None
        except HTTPError as error:
            raise ConnectionFailedError(
                f"The API of Kubernetes does not answer: {type(error).__name__}.", hint="Check the cluster."
            ) from None
        return KubernetesJob(self.api, self.namespace, manifest["metadata"]["name"])

    def manifest(self, dispatch: Dispatch) -> dict[str, Any]:
        """Return the Job of a run."""
        labels = {"app.kubernetes.io/managed-by": "weft", LABEL: label_value(dispatch.pipeline)}
        resources = {name: self.options[name] for name in ("cpu", "memory") if name in self.options}
        container: dict[str, Any] = {
            "name": "run",
            "image": self.options["image"],
            "command": [self.options.get("command", "weft")],
            "args": dispatch.arguments,
            "env": [
                *({"name": name, "value": value} for name, value in dispatch.environment.items()),
                *self._spark(dispatch),
            ],
            "envFrom": [{"secretRef": {"name": name}} for name in self.secrets],
        }
        if resources:
            container["resources"] = {"requests": resources, "limits": resources}
        if "image-pull-policy" in self.options:
            container["imagePullPolicy"] = self.options["image-pull-policy"]
        pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
        if "service-account" in self.options:
            pod["serviceAccountName"] = self.options["service-account"]
        spec: dict[str, Any] = {
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": int(self.options.get("ttl-seconds", "3600")),
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        if "deadline-seconds" in self.options:
            spec["activeDeadlineSeconds"] = int(self.options["deadline-seconds"])
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job_name(dispatch.pipeline), "namespace": self.namespace, "labels": labels},
            "spec": spec,
        }

    def _spark(self, dispatch: Dispatch) -> list[dict[str, Any]]:
        """Return the variables that make the Pod of a run the driver of executors in Pods beside it."""
        if "spark-executors" not in self.options:
            return []
        conf = {
            "spark.app.name": f"weft {dispatch.pipeline}",
            "spark.executor.instances": self.options["spark-executors"],
            "spark.kubernetes.namespace": self.namespace,
            "spark.kubernetes.container.image": self.options["spark-image"],
            # They end with the Pod of the run, also where that is killed.
            "spark.kubernetes.driver.pod.name": "$(WEFT_POD)",
            "spark.driver.host": "$(WEFT_POD_IP)",
            "spark.driver.bindAddress": "0.0.0.0",
        }
        if "service-account" in self.options:
            conf["spark.kubernetes.authenticate.executor.serviceAccountName"] = self.options["service-account"]
        of_pod = {"WEFT_POD": "metadata.name", "WEFT_POD_IP": "status.podIP"}
        return [
            # First, because Kubernetes puts into a variable those that stand before it.
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in of_pod.items()),
            {"name": config.MASTER_VARIABLE, "value": "k8s://https://kubernetes.default.svc"},
            {"name": config.CONF_VARIABLE, "value": json.dumps(conf)},
        ]


def job_name(pipeline: str) -> str:
    """Return a name for a Job that no other one has: at most 63 small letters, digits and dashes."""
    readable = re.sub(r"[^a-z0-9]+", "-", pipeline.lower()).strip("-")[:40].strip("-")
    return "-".join(filter(None, ("weft", readable, uuid4().hex[:10])))


def label_value(pipeline: str) -> str:
    """Return a pipeline's name as Kubernetes takes it for the value of a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", pipeline)[:63].strip("-_.")


def _message(error: Any) -> str:
    """Return what the API says is wrong."""
    try:
        return str(json.loads(error.body)["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return "it says no more"
