{{/* The name of everything: the release's, with the chart's unless it is in it. */}}
{{- define "anabranch.name" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Labels by which things are selected. Takes root and part. */}}
{{- define "anabranch.selector" -}}
app.kubernetes.io/name: anabranch
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "anabranch.labels" -}}
{{ include "anabranch.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "anabranch.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{- define "anabranch.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "anabranch.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* The ConfigMap of /pipeline; empty when the image has the folder. */}}
{{- define "anabranch.pipeline" -}}
{{- if not .Values.pipeline.inImage }}{{ .Values.pipeline.configMap | default (printf "%s-pipeline" (include "anabranch.name" .)) }}{{ end }}
{{- end }}

{{/* What the values contradict. */}}
{{- define "anabranch.check" -}}
{{- $sources := list (ne .Values.pipeline.toml "") (ne .Values.pipeline.configMap "") .Values.pipeline.inImage }}
{{- if ne (len (without $sources false)) 1 }}
{{- fail "set exactly one of pipeline.toml, pipeline.configMap and pipeline.inImage: the folder of pipeline.toml and the model's code" }}
{{- end }}
{{- if and (eq .Values.mode "separate") (not .Values.storage.url) (ne .Values.state.accessMode "ReadWriteMany") }}
{{- fail "mode = separate: servers get versions by storage.url, or by a volume with state.accessMode = ReadWriteMany; set one of them, or mode = shared" }}
{{- end }}
{{- if and .Values.strimzi.enabled (not .Values.stream.topics) }}
{{- fail "strimzi.enabled: set stream.topics, the topics to create" }}
{{- end }}
{{- if and (eq .Values.mode "shared") (gt (int .Values.serving.timeoutSeconds) (add (int .Values.learner.stopTimeoutSeconds) 5)) }}
{{- fail "mode = shared: `anabranch up` ends both parts learner.stopTimeoutSeconds + 5 s after serving.drainSeconds; serving.timeoutSeconds is longer: raise the one or lower the other" }}
{{- end }}
{{- if and (or .Values.learner.gpu.resource .Values.serving.gpu.resource) (eq .Values.image.tag "cpu") (not .Values.image.digest) }}
{{- fail "gpu.resource asks for a GPU, and image.tag = cpu names the image without CUDA: build one with TORCH=cuda, and set image.tag" }}
{{- end }}
{{- if eq (int .Values.serving.grpcPort) (int .Values.serving.service.port) }}
{{- fail "serving.grpcPort is serving.service.port: the Service needs a port for each" }}
{{- end }}
{{- if and .Values.pipeline.files (not .Values.pipeline.toml) }}
{{- fail "pipeline.files goes with pipeline.toml" }}
{{- end }}
{{- if .Values.networkPolicy.enabled }}
{{- $egress := .Values.networkPolicy.egress }}
{{- range splitList "," .Values.stream.bootstrapServers }}
{{- $port := regexFind ":[0-9]+$" (trim .) | trimPrefix ":" }}
{{- include "anabranch.checkPort" (dict "key" "stream.bootstrapServers" "port" $port "to" "kafka" "ports" $egress.kafka.ports) }}
{{- end }}
{{- range $name, $value := ternary .Values.storage.options dict (ne .Values.storage.url "") }}
{{- if and (contains "endpoint" $name) (contains "://" $value) }}
{{- $port := regexFind ":[0-9]+$" (urlParse $value).host | trimPrefix ":" | default (ternary "80" "443" (hasPrefix "http:" $value)) }}
{{- include "anabranch.checkPort" (dict "key" (printf "storage.options.%s" $name) "port" $port "to" "storage" "ports" $egress.storage.ports) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Pods that can reach nothing would start, and only wait. Takes key, port, to and ports. */}}
{{- define "anabranch.checkPort" -}}
{{- if and .port (not (has .port (toStrings .ports))) }}
{{- fail (printf "%s names port %s, which networkPolicy.egress.%s.ports does not allow: add it there" .key .port .to) }}
{{- end }}
{{- end }}

{{/* Whether the state outlives the pod on a volume. */}}
{{- define "anabranch.hasVolume" -}}
{{- if not (and .Values.storage.url (eq .Values.storage.mode "only")) }}true{{ end }}
{{- end }}

{{- define "anabranch.secretEnv" -}}
{{- range $name, $from := . }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ $from.secret }}, key: {{ $from.key }}}}
{{- end }}
{{- end }}

{{/* Variables of all containers of our image. */}}
{{- define "anabranch.env" -}}
- name: ANABRANCH__STATE_DIR
  value: /var/lib/anabranch
{{- with .Values.stream.topics }}
- name: ANABRANCH__STREAM__TOPICS
  value: {{ toJson . | quote }}
{{- end }}
{{- with .Values.stream.deadLetterTopic }}
- name: ANABRANCH__STREAM__DEAD_LETTER_TOPIC
  value: {{ . | quote }}
{{- end }}
{{- with .Values.storage }}
{{- if .url }}
- name: ANABRANCH__STORAGE__URL
  value: {{ .url | quote }}
- name: ANABRANCH__STORAGE__MODE
  value: {{ .mode }}
{{- with .lease }}
- name: ANABRANCH__STORAGE__LEASE
  value: {{ . }}
{{- end }}
{{- range $name, $value := .options }}
- name: ANABRANCH__STORAGE__OPTIONS__{{ upper $name }}
  value: {{ $value | quote }}
{{- end }}
{{- range $name, $from := .secretOptions }}
- name: ANABRANCH__STORAGE__OPTIONS__{{ upper $name }}
  valueFrom: {secretKeyRef: {name: {{ $from.secret }}, key: {{ $from.key }}}}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- include "anabranch.secretEnv" .Values.secretEnv }}
{{- end }}

{{/* Variables of what connects to the broker. */}}
{{- define "anabranch.streamEnv" -}}
{{- $servers := .Values.stream.bootstrapServers }}
{{- with .Values.strimzi }}
{{- if .enabled }}
{{- $servers = $servers | default (printf "%s-kafka-bootstrap:%s" .cluster (ternary "9092" "9093" (eq .authentication "none"))) }}
{{- if ne .authentication "none" }}
- name: ANABRANCH__STREAM__PROPERTIES__SSL.CA.LOCATION
  value: /run/secrets/kafka-cluster-ca/ca.crt
- name: ANABRANCH__STREAM__PROPERTIES__SECURITY.PROTOCOL
  value: {{ ternary "SSL" "SASL_SSL" (eq .authentication "tls") }}
{{- end }}
{{- if eq .authentication "scram-sha-512" }}
- name: ANABRANCH__STREAM__PROPERTIES__SASL.MECHANISM
  value: SCRAM-SHA-512
- name: ANABRANCH__STREAM__PROPERTIES__SASL.USERNAME
  value: {{ include "anabranch.name" $ }}
- name: ANABRANCH__STREAM__PROPERTIES__SASL.PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "anabranch.name" $ }}, key: password}}
{{- else if eq .authentication "tls" }}
- name: ANABRANCH__STREAM__PROPERTIES__SSL.CERTIFICATE.LOCATION
  value: /run/secrets/kafka-user/user.crt
- name: ANABRANCH__STREAM__PROPERTIES__SSL.KEY.LOCATION
  value: /run/secrets/kafka-user/user.key
{{- end }}
{{- end }}
{{- end }}
{{- with $servers }}
- name: ANABRANCH__STREAM__BOOTSTRAP_SERVERS
  value: {{ . | quote }}
{{- end }}
{{- include "anabranch.secretEnv" .Values.learner.secretEnv }}
{{- end }}

{{/* Variables of what serves. Takes root. */}}
{{- define "anabranch.servingEnv" -}}
- name: ANABRANCH__SERVING__HOST
  value: 0.0.0.0
- name: ANABRANCH__SERVING__PORT
  value: "8000"
{{- with .Values.serving.grpcPort }}
- name: ANABRANCH__SERVING__GRPC_PORT
  value: {{ . | quote }}
{{- end }}
- name: ANABRANCH__SERVING__TIMEOUT
  value: {{ .Values.serving.timeoutSeconds }}s
- name: ANABRANCH__SERVING__DRAIN
  value: {{ .Values.serving.drainSeconds }}s
- name: ANABRANCH__SERVING__TOKENS__ADMIN
  valueFrom: {secretKeyRef: {name: {{ .Values.tokens.secret }}, key: {{ .Values.tokens.adminKey }}}}
{{- if .Values.serving.tlsSecret }}
- name: ANABRANCH__SERVING__TLS__CERT
  value: /run/secrets/tls/tls.crt
- name: ANABRANCH__SERVING__TLS__KEY
  value: /run/secrets/tls/tls.key
{{- end }}
{{- end }}

{{- define "anabranch.readToken" -}}
- name: ANABRANCH__SERVING__TOKENS__READ
  valueFrom: {secretKeyRef: {name: {{ .Values.tokens.secret }}, key: {{ .Values.tokens.readKey }}}}
{{- end }}

{{- define "anabranch.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What the specs of all pods have. Takes root, part and the part's values. */}}
{{- define "anabranch.pod" -}}
serviceAccountName: {{ include "anabranch.serviceAccount" .root }}
# No pod asks the API server.
automountServiceAccountToken: false
# A Service `anabranch-serving` would become variables that begin with ANABRANCH_: refused as misspelt overrides.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # A large volume is not walked through at each start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/* As many threads of torch as processors are requested: it would take one for each of the node. */}}
{{- define "anabranch.threads" -}}
{{- if (.resources.requests | default dict).cpu }}
- name: OMP_NUM_THREADS
  valueFrom: {resourceFieldRef: {resource: requests.cpu}}
{{- end }}
{{- end }}

{{- define "anabranch.resources" -}}
{{- $limits := .resources.limits | default dict }}
{{- if .gpu.resource }}
{{- $limits = merge (dict .gpu.resource .gpu.count) $limits }}
{{- end }}
requests:
  {{- toYaml (.resources.requests | default dict) | nindent 2 }}
limits:
  {{- toYaml $limits | nindent 2 }}
{{- end }}

{{/* Mounts and volumes of all pods. */}}
{{- define "anabranch.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /var/lib/anabranch}
{{- if include "anabranch.pipeline" . }}
- {name: pipeline, mountPath: /pipeline, readOnly: true}
{{- end }}
{{- range $folder, $secret := .Values.secretFiles }}
- {name: secret-{{ $folder }}, mountPath: /run/secrets/{{ $folder }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "anabranch.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .values.tmpSize }}}
{{- with include "anabranch.pipeline" .root }}
- name: pipeline
  configMap: {name: {{ . }}}
{{- end }}
{{- range $folder, $secret := .root.Values.secretFiles }}
- name: secret-{{ $folder }}
  secret: {secretName: {{ $secret }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* Mounts and volumes of what connects to the broker. */}}
{{- define "anabranch.streamMounts" -}}
{{- if .Values.strimzi.enabled }}
{{- if ne .Values.strimzi.authentication "none" }}
- {name: kafka-cluster-ca, mountPath: /run/secrets/kafka-cluster-ca, readOnly: true}
{{- end }}
{{- if eq .Values.strimzi.authentication "tls" }}
- {name: kafka-user, mountPath: /run/secrets/kafka-user, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "anabranch.streamVolumes" -}}
{{- if .Values.strimzi.enabled }}
{{- if ne .Values.strimzi.authentication "none" }}
- name: kafka-cluster-ca
  secret:
    secretName: {{ .Values.strimzi.cluster }}-cluster-ca-cert
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- if eq .Values.strimzi.authentication "tls" }}
- name: kafka-user
  secret:
    secretName: {{ include "anabranch.name" . }}
    defaultMode: 0440
    items: [{key: user.crt, path: user.crt}, {key: user.key, path: user.key}]
{{- end }}
{{- end }}
{{- end }}

{{- define "anabranch.servingPorts" -}}
- {name: serving, containerPort: 8000}
{{- with .Values.serving.grpcPort }}
- {name: grpc, containerPort: {{ . }}}
{{- end }}
{{- end }}

{{/* Probes of a server. */}}
{{- define "anabranch.servingProbes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne .Values.serving.tlsSecret "") }}
startupProbe:
  httpGet: {path: /v2/health/live, port: serving, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add .Values.serving.startupSeconds 4) 5 }}
# Ready once there is a version to serve, which a first learner has yet to publish: that is no reason to restart.
readinessProbe:
  httpGet: {path: /v2/health/ready, port: serving, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /v2/health/live, port: serving, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
