"""What holds in every rendering of the chart and in every overlay."""

import json
import re
from typing import Any

import pytest
import yaml

from anabranch.core.durations import parse_duration
from anabranch.runtime.lifecycle import Exit
from tests.deploy.objects import (
    DEFAULTS,
    OVERLAYS,
    ROOT,
    SETS,
    SOURCES,
    containers,
    environment,
    named,
    objects,
    pods,
)

pytestmark = pytest.mark.process

MAIN = ("learner", "serving")
LINK_LOCAL = "169.254.0.0/16"


def everywhere():
    """Each source, with the name and the template of each of its pods."""
    for source in SOURCES:
        for workload, pod in pods(source).items():
            yield source, workload, pod


def test_no_pod_may_more_than_the_restricted_profile_allows():
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    volumes = {"configMap", "emptyDir", "persistentVolumeClaim", "secret", "name"}
    for source, workload, pod in everywhere():
        spec, security = pod["spec"], pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(spec), (source, workload)
        assert {key for volume in spec["volumes"] for key in volume} <= volumes, (source, workload)
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not [port for port in container.get("ports", ()) if "hostPort" in port]


def test_no_pod_can_ask_the_api_server():
    for source, workload, pod in everywhere():
        assert pod["spec"]["automountServiceAccountToken"] is False, (source, workload)
        assert pod["spec"]["serviceAccountName"]


def test_no_service_becomes_a_variable_that_is_refused_as_an_override():
    assert "anabranch-serving" in named("base", "Service")
    for source, workload, pod in everywhere():
        assert pod["spec"]["enableServiceLinks"] is False, (source, workload)


def test_torch_has_as_many_threads_as_processors_are_requested():
    for source in SOURCES:
        for name, container in containers(source).items():
            # torchrun gives each of its processes one thread.
            expected = None if name.startswith("JobSet/") or name.endswith("/topics") else "requests.cpu"
            assert environment(source, container).get("OMP_NUM_THREADS") == expected, (source, name)
            assert "cpu" in container["resources"]["requests"]


def test_every_container_has_bounds_and_can_write_only_into_volumes():
    for source in SOURCES:
        for name, container in containers(source).items():
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), (source, name)
            assert "memory" in resources["limits"]
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
            assert {"/tmp", "/var/lib/anabranch"} <= writable
            assert writable <= {"/tmp", "/var/lib/anabranch", "/var/cache/anabranch", "/dev/shm"}


def test_temporary_files_are_bounded():
    for source, workload, pod in everywhere():
        for volume in pod["spec"]["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], (source, workload)


def test_secrets_are_there_by_reference_alone():
    for source in SOURCES:
        assert not named(source, "Secret")
        for name, container in containers(source).items():
            for variable, value in environment(source, container).items():
                secret = re.search("PASSWORD|SECRET|TOKEN|ACCOUNT_KEY|ACCESS_KEY", variable)
                assert bool(secret) == value.startswith("secret "), (source, name, variable)


def test_each_container_has_the_tokens_that_it_needs_and_no_other():
    for source in SOURCES:
        for name, container in containers(source).items():
            given = {key.rpartition("__")[2] for key in environment(source, container) if "SERVING__TOKENS" in key}
            serves = {each["name"] for each in container.get("ports", ())} >= {"serving"}
            expected = set() if name.endswith("/topics") else {"READ", "ADMIN"} if serves else {"READ"}
            assert given == expected, (source, name)


def test_no_variable_is_set_twice():
    for source in SOURCES:
        for name, container in containers(source).items():
            names = [each["name"] for each in container["env"]]
            assert len(names) == len(set(names)), (source, name)


def test_a_label_selects_the_pods_of_its_own_workload_alone():
    for source in SOURCES:
        labels = {workload: pod["metadata"]["labels"].items() for workload, pod in pods(source).items()}
        for each in objects(source):
            if each["kind"] in ("StatefulSet", "Deployment"):
                chosen = each["spec"]["selector"]["matchLabels"].items()
                assert [name for name, has in labels.items() if chosen <= has] == [
                    f"{each['kind']}/{each['metadata']['name']}"
                ]


def selected(source, selector):
    """The pods that labels select; the index of a pod of a Job is a label that Kubernetes adds."""
    chosen = {key: value for key, value in selector.items() if key != "batch.kubernetes.io/job-completion-index"}
    return [pod for pod in pods(source).values() if chosen.items() <= pod["metadata"]["labels"].items()]


def ports(pod):
    return {each["name"]: each["containerPort"] for c in pod["spec"]["containers"] for each in c["ports"]}


def test_services_and_network_policies_name_ports_of_pods_that_are_there():
    for source in SOURCES:
        services, policies = named(source, "Service"), named(source, "NetworkPolicy")
        assert {name.rpartition("-")[2] for name in services} == set(MAIN)
        for service in services.values():
            (pod,) = selected(source, service["spec"]["selector"])
            for port in service["spec"]["ports"]:
                assert port["targetPort"] in ports(pod)
        for policy in policies.values():
            (pod,) = selected(source, policy["spec"]["podSelector"]["matchLabels"])
            assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
            named_ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
            assert named_ports <= set(ports(pod))
            # All of them may be reached by somebody, but those for other ranks.
            assert named_ports == set(ports(pod)) - {"rendezvous"}
            egress = [port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())]
            assert {53, 5353} <= set(egress)
        if source != "no network policy":
            assert len(policies) == len(pods(source))


def test_servers_with_grpc_are_reached_by_it_from_clients_alone():
    for source in ("shared with TLS", "a strict network policy"):
        (service,) = [each for name, each in named(source, "Service").items() if name.endswith("-serving")]
        assert {"name": "grpc", "port": 9000, "targetPort": "grpc"} in service["spec"]["ports"]
        (pod,) = selected(source, service["spec"]["selector"])
        variables = environment(source, pod["spec"]["containers"][0])
        assert ports(pod)["grpc"] == int(variables["ANABRANCH__SERVING__GRPC_PORT"]) == 9000
    rules = named("a strict network policy", "NetworkPolicy")["demo-anabranch-serving"]["spec"]["ingress"]
    (rule,) = [rule for rule in rules if rule["ports"] == [{"port": "grpc"}]]
    assert rule["from"] == SETS["a strict network policy"]["networkPolicy"]["clients"]


def test_servers_may_connect_to_the_bucket_alone():
    kafka = {*DEFAULTS["networkPolicy"]["egress"]["kafka"]["ports"], 9094}
    for source in SOURCES:
        for name, policy in named(source, "NetworkPolicy").items():
            allowed = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())} - {53, 5353}
            if name.endswith("-serving"):
                assert not allowed & kafka, source
                (pod,) = selected(source, policy["spec"]["podSelector"]["matchLabels"])
                variables = environment(source, pod["spec"]["containers"][0])
                assert bool(allowed) == ("ANABRANCH__STORAGE__URL" in variables), source
            else:
                assert allowed & kafka, source


def test_pods_that_have_no_keys_of_the_bucket_can_get_credentials_by_their_identity():
    for source in SOURCES:
        for name, policy in named(source, "NetworkPolicy").items():
            (pod,) = selected(source, policy["spec"]["podSelector"]["matchLabels"])
            variables = environment(source, pod["spec"]["containers"][0])
            has_bucket = "ANABRANCH__STORAGE__URL" in variables
            has_keys = any(re.search("SECRET|ACCOUNT_KEY", key) for key in variables if "STORAGE__OPTIONS" in key)
            rules = [each for each in policy["spec"]["egress"] if each.get("to") == [{"ipBlock": {"cidr": LINK_LOCAL}}]]
            assert [port["port"] for rule in rules for port in rule["ports"]] == (
                [80, 988] if has_bucket and not has_keys else []
            ), (source, name)


def test_a_fault_of_the_settings_ends_a_jobset_instead_of_a_restart():
    (jobset,) = named("overlays/ranks", "JobSet").values()
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    (check,) = job["template"]["spec"]["initContainers"]
    assert check["args"] == ["config", "check", "-c", "/pipeline/pipeline.toml"]
    assert check["env"] == job["template"]["spec"]["containers"][0]["env"]
    assert job["podFailurePolicy"]["rules"] == [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": check["name"], "operator": "In", "values": [int(Exit.SETTINGS)]},
        }
    ]
    assert jobset["spec"]["failurePolicy"]["rules"] == [
        {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]


def test_budgets_and_scalers_are_of_the_servers():
    seen = set()
    for source in SOURCES:
        deployments = named(source, "Deployment")
        for budget in named(source, "PodDisruptionBudget").values():
            (pod,) = selected(source, budget["spec"]["selector"]["matchLabels"])
            assert pod in [each["spec"]["template"] for each in deployments.values()]
            # One pod may always be evicted: a budget of minAvailable = 1 would block the drain of the only server.
            assert budget["spec"]["maxUnavailable"] >= 1
        for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
            for scaler in named(source, kind).values():
                seen.add(kind)
                target = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
                assert "replicas" not in target["spec"]
                assert "lag" not in json.dumps(scaler["spec"])
        assert len(deployments) == len(named(source, "PodDisruptionBudget")) or source == "no disruption budget"
    assert seen == {"HorizontalPodAutoscaler", "ScaledObject"}


def test_there_is_one_learner():
    for source in SOURCES:
        sets = [*named(source, "StatefulSet").values(), *named(source, "JobSet").values()]
        (learner,) = sets
        if learner["kind"] == "StatefulSet":
            assert learner["spec"]["replicas"] == 1
            assert learner["spec"]["podManagementPolicy"] == "Parallel"
            assert learner["spec"]["serviceName"] in named(source, "Service")
        else:
            assert learner["spec"]["replicatedJobs"][0]["replicas"] == 1


def test_an_update_of_servers_takes_none_away_unless_it_is_asked_to():
    for source in SOURCES:
        for deployment in named(source, "Deployment").values():
            rolling = deployment["spec"]["strategy"]["rollingUpdate"]
            assert rolling["maxUnavailable"] == (1 if source == "no room for a pod more" else 0)
            assert rolling["maxSurge"] + rolling["maxUnavailable"] >= 1


def test_the_state_outlives_a_pod_unless_it_is_in_a_bucket_alone():
    for source in SOURCES:
        for name, each in (named(source, "StatefulSet") | named(source, "JobSet")).items():
            (pod,) = [pod for workload, pod in pods(source).items() if workload.endswith(f"/{name}")]
            claims = {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())}
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            variables = environment(source, pod["spec"]["containers"][-1])
            alone = variables.get("ANABRANCH__STORAGE__MODE") == "only"
            assert ("state" in claims, "emptyDir" in volumes.get("state", {})) == (not alone, alone), source
        for deployment in named(source, "Deployment").values():
            (state,) = [v for v in deployment["spec"]["template"]["spec"]["volumes"] if v["name"] == "state"]
            variables = environment(source, deployment["spec"]["template"]["spec"]["containers"][0])
            if "ANABRANCH__STORAGE__URL" in variables:
                assert "emptyDir" in state
                assert variables["ANABRANCH__SERVING__VERSIONS_FROM"] == "storage"
            else:
                (learner,) = named(source, "StatefulSet")
                assert state["persistentVolumeClaim"]["claimName"] == f"state-{learner}-0"
                assert "ANABRANCH__SERVING__VERSIONS_FROM" not in variables


def test_every_volume_config_map_and_claim_that_is_named_exists():
    theirs = {"pipeline"}
    for source in SOURCES:
        maps = set(named(source, "ConfigMap")) | theirs
        for workload, pod in pods(source).items():
            kind, _, name = workload.partition("/")
            claims = named(source, kind)[name]["spec"].get("volumeClaimTemplates", ())
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            assert all(volume["configMap"]["name"] in maps for volume in volumes.values() if "configMap" in volume)
            known = {*volumes, *(claim["metadata"]["name"] for claim in claims)}
            for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                mounted = [mount["name"] for mount in container["volumeMounts"]]
                assert set(mounted) <= known, (source, workload)
                for reference in container.get("envFrom", ()):
                    assert reference["configMapRef"]["name"] in maps - theirs
        accounts = named(source, "ServiceAccount")
        asked = {pod["spec"]["serviceAccountName"] for pod in pods(source).values()}
        assert set(accounts) == (set() if source == "an account that exists" else asked)


def test_the_grace_period_is_longer_than_what_a_stop_may_take():
    for source, workload, pod in everywhere():
        (container,) = pod["spec"]["containers"]
        variables, seconds = environment(source, container), 0.0
        if "serving" in {port["name"] for port in container["ports"]}:
            drain = parse_duration(variables["ANABRANCH__SERVING__DRAIN"]).total_seconds()
            assert drain >= 1
            seconds = drain + parse_duration(variables["ANABRANCH__SERVING__TIMEOUT"]).total_seconds()
        else:
            drain = 0.0
        if "ANABRANCH__LEARNER__STOP_TIMEOUT" in variables:
            stop = parse_duration(variables["ANABRANCH__LEARNER__STOP_TIMEOUT"]).total_seconds()
            for option in container["args"]:
                if option.startswith("--shutdown-timeout="):
                    assert float(option.partition("=")[2]) >= stop + 5
                    stop = float(option.partition("=")[2])
            # A supervisor ends its parts so long, and five seconds, after the time for draining.
            assert seconds <= drain + stop + 5
            seconds = drain + stop + 5
        assert pod["spec"]["terminationGracePeriodSeconds"] >= seconds + 5, (source, workload)


def test_probes_ask_ports_of_their_container():
    for source in SOURCES:
        for name, container in containers(source).items():
            known = {port["name"] for port in container.get("ports", ())}
            probes = {key: probe for key, probe in container.items() if key.endswith("Probe")}
            for probe in probes.values():
                assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in known
            learns = name.startswith("StatefulSet/") and not name.endswith("/topics")
            if name.startswith("Deployment/") or "serving" in known or learns:
                assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
            else:
                assert not probes


def test_a_start_may_take_as_long_as_the_values_say():
    for source, values in SETS.items():
        for container in containers(source).values():
            if "startupProbe" in container:
                part = "learner" if "tcpSocket" in container["startupProbe"] else "serving"
                seconds = values.get(part, {}).get("startupSeconds", DEFAULTS[part]["startupSeconds"])
                probe = container["startupProbe"]
                assert seconds <= probe["periodSeconds"] * probe["failureThreshold"] < seconds + 5
    (deployment,) = named("long requests", "Deployment").values()
    assert deployment["spec"]["progressDeadlineSeconds"] > SETS["long requests"]["serving"]["startupSeconds"]


def test_a_change_of_the_pipeline_replaces_the_pods():
    def checksum(source):
        (pod,) = pods(source).values()
        found = pod["metadata"]["annotations"].get("checksum/pipeline", "")
        return str(found)

    assert re.fullmatch("[0-9a-f]{64}", checksum("files in the values"))
    assert checksum("shared") == ""
    # With kustomize the name of the ConfigMap ends with a hash, also where a JobSet names it.
    for source in OVERLAYS:
        for container in containers(source).values():
            for reference in container["envFrom"]:
                assert re.fullmatch(r"settings-\w{10}", reference["configMapRef"]["name"])


def test_monitoring_selects_services_by_the_names_of_their_jobs():
    seen = 0
    for source in SETS:
        for monitor in named(source, "ServiceMonitor").values():
            spec = monitor["spec"]
            chosen = [
                service
                for service in named(source, "Service").values()
                if spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            ]
            (service,) = chosen
            (endpoint,) = spec["endpoints"]
            assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
            assert service["metadata"]["labels"][spec["jobLabel"]] in MAIN
            tokens = SETS[source].get("tokens", DEFAULTS["tokens"])
            assert endpoint["authorization"]["credentials"] == {"name": tokens["secret"], "key": tokens["readKey"]}
            tls = SETS[source].get("serving", {}).get("tlsSecret") and service["metadata"]["name"].endswith("serving")
            assert endpoint.get("scheme", "http") == ("https" if tls else "http")
            seen += 1
    assert seen >= 6


def test_rules_and_dashboard_are_those_of_compose():
    (rule,) = named("monitoring", "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/helm/anabranch/files/alerts.yml").read_text(encoding="utf-8"))
    dashboard = named("monitoring", "ConfigMap")["demo-anabranch-dashboard"]
    ours = json.loads((ROOT / "deploy/helm/anabranch/files/dashboards/anabranch.json").read_text(encoding="utf-8"))
    assert json.loads(dashboard["data"]["anabranch.json"]) == ours
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_topics_outlive_the_release():
    for source in ("Strimzi", "Strimzi with certificates"):
        topics = named(source, "KafkaTopic")
        assert topics
        for topic in topics.values():
            assert topic["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_the_user_of_the_broker_may_read_events_and_write_dead_letters():
    (user,) = named("Strimzi with certificates", "KafkaUser").values()
    rights: dict[str, Any] = {
        f"{acl['resource']['type']} {acl['resource']['name']}": set(acl["operations"])
        for acl in user["spec"]["authorization"]["acls"]
    }
    assert {name for name, operations in rights.items() if "Write" in operations} == {"topic rejected"}
    assert {"topic events", "topic clicks_EU", "topic labels", "group anabranch-"} < set(rights)
    written = {each["spec"]["topicName"] for each in named("Strimzi with certificates", "KafkaTopic").values()}
    assert written == {"events", "clicks_EU", "labels", "rejected"}
    (secret,) = [
        volume["secret"]["secretName"]
        for volume in next(iter(pods("Strimzi with certificates").values()))["spec"]["volumes"]
        if volume["name"] == "kafka-user"
    ]
    assert secret == user["metadata"]["name"]
