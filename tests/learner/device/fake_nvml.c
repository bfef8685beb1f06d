/* A libnvidia-ml.so.1 that replays a script, so that the real nvidia-ml-py can be tested without a device.
 *
 * FAKE_NVML_SCRIPT names a text file. Its first line lists the UUIDs of the devices, the second one is their state at
 * nvmlInit: pairs `name=value`, or `N:name=value` of device N, which hold from then on. Each later line is one tick. A
 * tick begins with each query of the memory of device 0. After the last line everything stays as it is.
 *
 * Names besides those of `names` below: xid=N adds an event, error=CODE is what all queries of the device return, and
 * hang=SECONDS lets this one query of the memory wait. A value of -1 is not supported by the device.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };
enum { MOST_DEVICES = 8, MOST_XIDS = 64 };

static const char *const names[] = {
    "memory_used", "memory_total", "utilization", "temperature", "slowdown_at", "memory_max_at", "power", "power_limit",
    "sm_clock", "memory_clock", "slowdown", "links", "links_up", "pid", "pid_bytes",
    /* by field value */
    "corrected", "uncorrected", "lifetime_corrected", "lifetime_uncorrected", "memory_temperature", "energy",
    "pcie_replays", "nvlink_replays", "nvlink_recoveries", "remapped_corrected", "remapped_uncorrected",
    "remap_pending", "remap_failed", "recovery",
};
static const struct { int field; const char *name; } fields[] = {
    {3, "corrected"}, {4, "uncorrected"}, {5, "lifetime_corrected"}, {6, "lifetime_uncorrected"},
    {82, "memory_temperature"}, {83, "energy"}, {94, "pcie_replays"}, {52, "nvlink_replays"},
    {59, "nvlink_recoveries"}, {142, "remapped_corrected"}, {143, "remapped_uncorrected"}, {144, "remap_pending"},
    {145, "remap_failed"}, {230, "recovery"},
};
enum { NAMES = sizeof names / sizeof *names, FIELDS = sizeof fields / sizeof *fields };

typedef struct {
    char uuid[96];
    double values[NAMES];
    int error, xids[MOST_XIDS], xid_count;
    double hang;
} Device;

static Device devices[MOST_DEVICES];
static int device_count;
static FILE *script;
static long calls;

/* How many queries there were, for tests that count. */
long fake_nvml_calls(void) { return calls; }

static int index_of(const char *name) {
    for (int i = 0; i < (int)NAMES; i++)
        if (!strcmp(names[i], name)) return i;
    fprintf(stderr, "fake_nvml: %s is not a name\n", name);
    abort();
}

static double value_of(const Device *device, const char *name) { return device->values[index_of(name)]; }

static void apply(char *pair) {
    Device *device = devices;
    if (pair[1] == ':') {
        device = &devices[pair[0] - '0'];
        pair += 2;
    }
    char *equals = strchr(pair, '=');
    if (!equals) return;
    *equals = 0;
    double value = atof(equals + 1);
    if (!strcmp(pair, "xid")) {
        if (device->xid_count < MOST_XIDS) device->xids[device->xid_count++] = (int)value;
    } else if (!strcmp(pair, "error")) {
        device->error = (int)value;
    } else if (!strcmp(pair, "hang")) {
        device->hang = value;
    } else {
        device->values[index_of(pair)] = value;
    }
}

static void tick(void) {
    static char line[65536];
    if (!script) return;
    clearerr(script); /* a test may have added ticks since the end was read */
    if (!fgets(line, sizeof line, script)) return;
    for (char *pair = strtok(line, " \n"); pair; pair = strtok(NULL, " \n")) apply(pair);
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    const char *path = getenv("FAKE_NVML_SCRIPT");
    static char line[4096];
    memset(devices, 0, sizeof devices);
    device_count = 0;
    calls = 0;
    if (script) fclose(script);
    script = path ? fopen(path, "r") : NULL;
    if (!script) return 9; /* the driver is not loaded */
    if (!fgets(line, sizeof line, script)) return 999;
    for (char *uuid = strtok(line, " \n"); uuid; uuid = strtok(NULL, " \n")) {
        Device *device = &devices[device_count++];
        snprintf(device->uuid, sizeof device->uuid, "%s", uuid);
        for (int i = 0; i < (int)NAMES; i++) device->values[i] = -1;
        device->values[index_of("memory_total")] = 80e9;
        device->values[index_of("memory_used")] = 0;
    }
    tick();
    return SUCCESS;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) {
    (void)error;
    return "an error of the fake library";
}

#define QUERY(name) calls++; if (device->error) return device->error; \
    double value = value_of(device, name); if (value < 0) return NOT_SUPPORTED

int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)device_count; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if ((int)index >= device_count) return NOT_FOUND;
    *device = &devices[index];
    return devices[index].error;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    for (int i = 0; i < device_count; i++)
        if (!strcmp(devices[i].uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2((unsigned)i, device);
    return NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *device, Device **board) { *board = device; return SUCCESS; }
int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
    snprintf(uuid, size, "%s", device->uuid);
    return device->error;
}
int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
    snprintf(name, size, "NVIDIA Fake");
    return device->error;
}
int nvmlDeviceGetMemoryInfo(Device *device, unsigned long long *memory) {
    calls++;
    if (device == devices) tick();
    if (device->hang > 0) {
        double seconds = device->hang;
        device->hang = 0;
        usleep((useconds_t)(seconds * 1e6));
    }
    if (device->error) return device->error;
    memory[0] = (unsigned long long)value_of(device, "memory_total");
    memory[2] = (unsigned long long)value_of(device, "memory_used");
    memory[1] = memory[0] - memory[2];
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(Device *device, unsigned *rates) {
    QUERY("utilization");
    rates[0] = rates[1] = (unsigned)value;
    return SUCCESS;
}
int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *celsius) {
    (void)sensor;
    QUERY("temperature");
    *celsius = (unsigned)value;
    return SUCCESS;
}
int nvmlDeviceGetTemperatureThreshold(Device *device, unsigned which, unsigned *celsius) {
    (void)device;
    if (which == 1) *celsius = 90; /* slowdown */
    else if (which == 2) *celsius = 95; /* of the memory */
    else return NOT_SUPPORTED;
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    QUERY("power");
    *milliwatts = (unsigned)(value * 1000);
    return SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *milliwatts) {
    QUERY("power_limit");
    *milliwatts = (unsigned)(value * 1000);
    return SUCCESS;
}
int nvmlDeviceGetClockInfo(Device *device, unsigned which, unsigned *megahertz) {
    QUERY(which == 2 ? "memory_clock" : "sm_clock");
    *megahertz = (unsigned)value;
    return SUCCESS;
}
int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    QUERY("slowdown");
    *reasons = (unsigned long long)value;
    return SUCCESS;
}
int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *up) {
    QUERY("links");
    if ((double)link >= value) return NOT_SUPPORTED;
    double links_up = value_of(device, "links_up");
    *up = links_up < 0 || (double)link < links_up;
    return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *processes) {
    calls++;
    if (device->error) return device->error;
    double pid = value_of(device, "pid");
    if (pid < 0) { *count = 0; return SUCCESS; }
    if (*count < 1) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    processes[0] = (Process){(unsigned)pid, (unsigned long long)value_of(device, "pid_bytes"), 0, 0};
    return SUCCESS;
}

typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency;
    unsigned type;
    int result;
    union { double number; unsigned long long count; } value;
} FieldValue;
int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *wanted) {
    calls++;
    if (device->error) return device->error;
    for (int i = 0; i < count; i++) {
        wanted[i].result = NOT_SUPPORTED;
        for (int j = 0; j < (int)FIELDS; j++) {
            if (fields[j].field != (int)wanted[i].field) continue;
            double value = value_of(device, fields[j].name);
            if (value < 0) continue;
            wanted[i].result = SUCCESS;
            wanted[i].type = 3; /* unsigned long long */
            wanted[i].value.count = (unsigned long long)value;
        }
    }
    return SUCCESS;
}

typedef struct { Device *device; } EventSet;
typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
int nvmlEventSetCreate(EventSet **set) { *set = calloc(1, sizeof **set); return SUCCESS; }
int nvmlEventSetFree(EventSet *set) { free(set); return SUCCESS; }
int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    (void)types;
    set->device = device;
    return SUCCESS;
}
int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned milliseconds) {
    (void)milliseconds;
    calls++;
    if (!set->device || !set->device->xid_count) return TIMEOUT;
    *event = (Event){set->device, 8, (unsigned long long)set->device->xids[0], 0, 0};
    memmove(set->device->xids, set->device->xids + 1, (size_t)(--set->device->xid_count) * sizeof(int));
    return SUCCESS;
}
