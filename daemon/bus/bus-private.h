#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of daemon/bus share: the state of the bus side, and the objects that live on it. */

#include "daemon/bus/bus-error.h"
#include "daemon/bus/bus.h"
#include "daemon/bus/call-options.h"
#include "daemon/bus/client.h"
#include "daemon/bus/id-table.h"
#include "daemon/bus/roster.h"
#include "quant/base/log.h"

#define BUS_ROOT          "/org/leat/Inference1"
#define BUS_MODEL_ROOT    BUS_ROOT "/model"
#define BUS_DEVICE_ROOT   BUS_ROOT "/device"
#define BUS_DEVICE_PATH   BUS_DEVICE_ROOT "/0"
#define BUS_SERVICE_ROOT  BUS_ROOT "/service"
#define BUS_SESSION_ROOT  BUS_ROOT "/session"
#define BUS_JOB_ROOT      BUS_ROOT "/job"

#define BUS_INTERFACE_MANAGER BUS_NAME ".Manager"
#define BUS_INTERFACE_MODEL   BUS_NAME ".Model"
#define BUS_INTERFACE_DEVICE  BUS_NAME ".Device"
#define BUS_INTERFACE_SERVICE BUS_NAME ".Service"
#define BUS_INTERFACE_SESSION BUS_NAME ".Session"
#define BUS_INTERFACE_JOB     BUS_NAME ".Job"

/* Room for the path of a session or job. */
#define BUS_ID_PATH_BYTES 64

struct Bus {
    sd_bus *bus;
    sd_event *event;
    sd_event_source *engine_source;
    Engine *engine;       /* borrowed */
    const Config *config; /* borrowed */
    const char *config_path;
    int (*reload)(void *userdata, ErrorDetail *reterr);
    void (*device_changed)(void *userdata);
    void *userdata;
    uid_t uid;            /* ours */
    uint32_t max_queue;   /* what the engine was started with */
    uint64_t stream_timeout_usec;
    uint64_t config_generation;
    bool config_ok;
    uint64_t last_owner, last_cookie;
    uint64_t idle_since_usec;
    uint64_t n_prompt_bytes; /* of all clients */
    IdTable clients;      /* BusClient by owner */
    IdTable jobs;         /* BusJob by job */
    IdTable sessions;     /* BusSession by session */
    IdTable questions;    /* BusQuestion by cookie */
    IdTable requests;     /* BusRequest by cookie: descriptors that are being read */
    BusRoster models, services; /* as configured */
};

/* ---- registering; each returns 0 or a negative errno ------------------------------------------------------------------------- */

int bus_manager_register(Bus *bus);
int bus_model_register(Bus *bus);
int bus_device_register(Bus *bus);
int bus_service_register(Bus *bus);
int bus_session_register(Bus *bus);
int bus_job_register(Bus *bus);
int bus_log_control_register(Bus *bus);

/* Makes objects for what @config names, keeps those that stay, announces the rest. */
int bus_model_set_config(Bus *bus, const Config *config);
int bus_service_set_config(Bus *bus, const Config *config);
/* Announces what changed. */
void bus_model_changed(Bus *bus, const char *name);
void bus_device_changed(Bus *bus);

/* ---- who may, and which model ------------------------------------------------------------------------------------------------ */

/* Root and the daemon's own user; else -EACCES with AccessDenied in @error. */
int bus_authorise_admin(Bus *bus, sd_bus_message *m, sd_bus_error *error);

/* The configured model of that name or alias; "" is the first one.  NULL with NoSuchModel in @error. */
const ConfigModel *bus_find_model(Bus *bus, const char *name, sd_bus_error *error);
/* ready, loading, available or unavailable; *ret_reason (sizeof ErrorDetail) says why the last. */
const char *bus_model_availability(Bus *bus, const char *name, ErrorDetail *ret_reason);
/* The policy of @model with @nearest (may be NULL) over its blocks; negative with the error in @error. */
int bus_policy(Bus *bus, const ConfigModel *model, const ConfigCache *service, const ConfigCache *nearest, KvPolicy *ret, sd_bus_error *error);

/* CLOCK_MONOTONIC. */
uint64_t bus_now_usec(void);

/* Object paths ROOT/ID.  False when it is not below @root; 0, which no object has, when what follows is no id. */
bool bus_path_to_id(const char *path, const char *root, uint64_t *ret);
void bus_id_to_path(const char *root, uint64_t id, char ret[BUS_ID_PATH_BYTES]);
