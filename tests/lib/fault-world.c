/* SPDX-License-Identifier: Apache-2.0 */
/* What fault scripts run on: the device, a toy model or layers without one, stores. */

#include "tests/lib/fault-script.h"

#include <sys/syscall.h>
#include <unistd.h>

static int open_file(const ScriptShape *shape, ModelFile **ret, ErrorDetail *reterr)
{
    char path[4096];

    rig_path(shape->file, path, sizeof(path));
    return model_file_open(path, NULL, ret, reterr);
}

static int open_model(const ScriptShape *shape, ScriptWorld *world, ErrorDetail *reterr)
{
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    int r = open_file(shape, &file, reterr);

    if (!r)
        r = model_new(world->gpu, file, &shape->options, &world->model, reterr);
    if (!r)
        file = NULL; /* the model's now */
    if (!r)
        r = model_store_new(world->model, &shape->policy, &world->store, reterr);
    if (!r && shape->has_other)
        r = model_store_new(world->model, &shape->other, &world->other, reterr);
    return r;
}

static int open_layers(const ScriptShape *shape, ScriptWorld *world, ErrorDetail *reterr)
{
    int r = fault_layers_new(world->gpu, &shape->layers[0], &world->layers, reterr);

    return r ? r : fault_layers_store(world->layers, &shape->layers[0], &world->store, reterr);
}

int script_world_open(const ScriptShape *shape, ScriptWorld *ret, ErrorDetail *reterr)
{
    GpuOptions options = {.cache_dir = getenv("LEAT_TEST_CACHE"), .deadline_usec = shape->deadline_usec};
    ScriptWorld world = SCRIPT_WORLD_NULL;
    int r;

    world.fd = (int)syscall(SYS_memfd_create, "saved", 0u); /* the test's own: no fault is meant for it */
    r = gpu_open(&options, &world.gpu, reterr);
    if (!r)
        r = shape->layers[0].n_layers > 0 ? open_layers(shape, &world, reterr) : open_model(shape, &world, reterr);
    if (r)
        script_world_close(&world);
    *ret = world;
    return r;
}

void script_world_close(ScriptWorld *world)
{
    uint64_t used = 0;

    kv_store_free(world->other);
    kv_store_free(world->store);
    (void)fault_layers_free(world->layers);
    model_free(world->model);
    if (world->gpu)
        gpu_memory_used(world->gpu, NULL, &used);
    MUST(used == 0);
    gpu_free(world->gpu);
    if (world->fd >= 0)
        (void)close(world->fd);
    *world = SCRIPT_WORLD_NULL;
}
