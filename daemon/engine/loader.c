/* SPDX-License-Identifier: Apache-2.0 */
/* The task that opens a model file. */

#include "daemon/engine/loader.h"
#include "daemon/engine/engine-internal.h"

#include <string.h>

typedef struct LoadTask {
    Task task; /* first */
    char *path;
    const char *state_dir;
} LoadTask;

static Task *load_task_free(Task *task)
{
    LoadTask *load = (LoadTask *)task;

    free(load->path);
    free(load);
    return NULL;
}

static void load_task_run(Task *task)
{
    LoadTask *load = (LoadTask *)task;
    Command *answer = task->answer;

    answer->result = result_from_model(model_file_open(load->path, load->state_dir, &answer->file, &answer->detail));
}

int loader_open(Worker *worker, uint64_t slot, const char *path, const char *state_dir)
{
    LoadTask *load = calloc(1, sizeof(*load));

    if (!load)
        return error_origin(-ENOMEM);
    load->task.run = load_task_run;
    load->task.free = load_task_free;
    load->path = strdup(path);
    load->state_dir = state_dir;
    load->task.answer = command_new(COMMAND_FILE_OPENED, slot);
    if (!load->path || !load->task.answer) {
        (void)command_free(load->task.answer);
        (void)load_task_free(&load->task);
        return error_origin(-ENOMEM);
    }
    worker_post(worker, &load->task);
    return 0;
}
