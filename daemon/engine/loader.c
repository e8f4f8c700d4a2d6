/* SPDX-License-Identifier: Apache-2.0 */
/* The worker that opens model files. */

#include "daemon/engine/loader.h"
#include "daemon/engine/engine-internal.h"

#include <signal.h>
#include <string.h>

typedef struct Request Request;
struct Request {
    Request *next;
    char *path;
    Command *answer; /* made with the request, so that it can always be sent */
};

struct Loader {
    Mailbox *mailbox;
    char *state_dir;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    Request *requests;
    bool started, quitting;
};

static Request *request_free(Request *request)
{
    if (!request)
        return NULL;
    free(request->path);
    command_free(request->answer);
    free(request);
    return NULL;
}
DEFINE_CLEANUP(Request, request_free)

static Request *loader_next(Loader *loader)
{
    Request *request;

    (void)pthread_mutex_lock(&loader->lock);
    while (!loader->requests && !loader->quitting)
        (void)pthread_cond_wait(&loader->wake, &loader->lock);
    request = loader->quitting ? NULL : loader->requests;
    if (request)
        loader->requests = request->next;
    (void)pthread_mutex_unlock(&loader->lock);
    return request;
}

static void *loader_main(void *userdata)
{
    Loader *loader = userdata;
    sigset_t all;

    /* Signals are the main thread's. */
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, NULL);
    for (;;) {
        _cleanup_(request_freep) Request *request = loader_next(loader);
        Command *answer;
        int r;

        if (!request)
            return NULL;
        answer = request->answer;
        r = model_file_open(request->path, loader->state_dir, &answer->file, &answer->detail);
        answer->result = result_from_model(r);
        mailbox_post(loader->mailbox, TAKE_PTR(request->answer));
    }
}

int loader_new(Mailbox *mailbox, const char *state_dir, Loader **ret, ErrorDetail *reterr)
{
    _cleanup_(loader_freep) Loader *loader = calloc(1, sizeof(*loader));
    int r;

    if (!loader)
        return error_origin(-ENOMEM);
    loader->mailbox = mailbox;
    (void)pthread_mutex_init(&loader->lock, NULL);
    (void)pthread_cond_init(&loader->wake, NULL);
    if (state_dir) {
        loader->state_dir = strdup(state_dir);
        if (!loader->state_dir)
            return error_origin(-ENOMEM);
    }
    r = pthread_create(&loader->thread, NULL, loader_main, loader);
    if (r > 0)
        return error_detail_set(reterr, -r, "cannot start the thread that loads models: %s", strerror(r));
    (void)pthread_setname_np(loader->thread, "leat-loader");
    loader->started = true;
    *ret = TAKE_PTR(loader);
    return 0;
}

Loader *loader_free(Loader *loader)
{
    if (!loader)
        return NULL;
    (void)pthread_mutex_lock(&loader->lock);
    loader->quitting = true;
    (void)pthread_cond_signal(&loader->wake);
    (void)pthread_mutex_unlock(&loader->lock);
    if (loader->started)
        (void)pthread_join(loader->thread, NULL);
    for (Request *r = loader->requests, *next; r; r = next) {
        next = r->next;
        request_free(r);
    }
    (void)pthread_cond_destroy(&loader->wake);
    (void)pthread_mutex_destroy(&loader->lock);
    free(loader->state_dir);
    free(loader);
    return NULL;
}

int loader_open(Loader *loader, uint64_t slot, const char *path)
{
    _cleanup_(request_freep) Request *request = calloc(1, sizeof(*request));
    Request **last;

    if (!request)
        return error_origin(-ENOMEM);
    request->path = strdup(path);
    request->answer = command_new(COMMAND_FILE_OPENED, slot);
    if (!request->path || !request->answer)
        return error_origin(-ENOMEM);
    (void)pthread_mutex_lock(&loader->lock);
    for (last = &loader->requests; *last; last = &(*last)->next)
        continue;
    *last = TAKE_PTR(request);
    (void)pthread_cond_signal(&loader->wake);
    (void)pthread_mutex_unlock(&loader->lock);
    return 0;
}
