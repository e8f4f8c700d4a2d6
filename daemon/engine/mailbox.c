/* SPDX-License-Identifier: Apache-2.0 */
/* Commands in, events out.  See the header. */

#include "daemon/engine/mailbox.h"
#include "daemon/engine/job.h"
#include "daemon/engine/model-config.h"
#include "daemon/engine/query.h"

#include <pthread.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>

typedef struct EventNode EventNode;
struct EventNode {
    EngineEvent event; /* first: engine_event_free() gets its address */
    EventNode *next;
};

struct Mailbox {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int event_fd;
    Command *first_command, *last_command;
    EventNode *first_event, *last_event;
    bool waiting;
    uint64_t beats, allowed_until_usec;
};

uint64_t now_usec(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

Command *command_new(CommandKind kind, uint64_t id)
{
    Command *command = calloc(1, sizeof(*command));

    if (!command)
        return NULL;
    command->kind = kind;
    command->id = id;
    return command;
}

Command *command_free(Command *command)
{
    if (!command)
        return NULL;
    job_free(command->job);
    query_free(command->query);
    model_configs_free(command->models, command->n_models);
    model_file_free(command->file);
    free(command);
    return NULL;
}

int mailbox_new(Mailbox **ret, ErrorDetail *reterr)
{
    _cleanup_(mailbox_freep) Mailbox *mailbox = NULL;
    pthread_condattr_t attributes;

    mailbox = calloc(1, sizeof(*mailbox));
    if (!mailbox)
        return error_origin(-ENOMEM);
    mailbox->event_fd = -1;
    (void)pthread_mutex_init(&mailbox->lock, NULL);
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&mailbox->wake, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    mailbox->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (mailbox->event_fd < 0)
        return error_detail_set(reterr, -errno, "cannot make an eventfd: %m");
    *ret = TAKE_PTR(mailbox);
    return 0;
}

Mailbox *mailbox_free(Mailbox *mailbox)
{
    if (!mailbox)
        return NULL;
    for (Command *c = mailbox->first_command, *next; c; c = next) {
        next = c->next;
        command_free(c);
    }
    for (EventNode *e = mailbox->first_event, *next; e; e = next) {
        next = e->next;
        engine_event_free(&e->event);
    }
    if (mailbox->event_fd >= 0)
        (void)close(mailbox->event_fd);
    (void)pthread_cond_destroy(&mailbox->wake);
    (void)pthread_mutex_destroy(&mailbox->lock);
    free(mailbox);
    return NULL;
}

void mailbox_post(Mailbox *mailbox, Command *command)
{
    (void)pthread_mutex_lock(&mailbox->lock);
    command->next = NULL;
    if (mailbox->last_command)
        mailbox->last_command->next = command;
    else
        mailbox->first_command = command;
    mailbox->last_command = command;
    (void)pthread_cond_signal(&mailbox->wake);
    (void)pthread_mutex_unlock(&mailbox->lock);
}

Command *mailbox_take(Mailbox *mailbox, uint64_t until_usec)
{
    struct timespec until = {(time_t)(until_usec / 1000000), (long)(until_usec % 1000000) * 1000};
    Command *command;
    int r = 0;

    (void)pthread_mutex_lock(&mailbox->lock);
    mailbox->waiting = until_usec != 0;
    while (!mailbox->first_command && until_usec != 0 && r != ETIMEDOUT)
        r = until_usec == UINT64_MAX ? pthread_cond_wait(&mailbox->wake, &mailbox->lock)
                                     : pthread_cond_timedwait(&mailbox->wake, &mailbox->lock, &until);
    mailbox->waiting = false;
    mailbox->beats++;
    command = mailbox->first_command;
    if (command) {
        mailbox->first_command = command->next;
        if (!mailbox->first_command)
            mailbox->last_command = NULL;
        command->next = NULL;
    }
    (void)pthread_mutex_unlock(&mailbox->lock);
    return command;
}

/* ---- events ---------------------------------------------------------------------------------------------------------------- */

EngineEvent *event_new(EngineEventKind kind)
{
    EventNode *node = calloc(1, sizeof(*node));

    if (!node)
        return NULL;
    node->event.kind = kind;
    return &node->event;
}

EngineEvent *engine_event_free(EngineEvent *event)
{
    if (!event)
        return NULL;
    free(event->text);
    free(event->ids);
    free(event->json);
    for (size_t i = 0; i < event->n_sequences; i++) {
        free(event->sequences[i].text);
        free(event->sequences[i].ids);
    }
    free(event->sequences);
    free((EventNode *)(void *)event);
    return NULL;
}

/* Appends @event's text or ids to @last; false when they do not fit together or memory is short (then they stay apart). */
static bool merge(EngineEvent *last, EngineEvent *event)
{
    if (last->kind != event->kind || last->job != event->job)
        return false;
    if (event->kind == ENGINE_EVENT_TEXT) {
        char *text = realloc(last->text, last->text_length + event->text_length + 1);

        if (!text)
            return false;
        memcpy(text + last->text_length, event->text, event->text_length);
        last->text = text;
        last->text_length += event->text_length;
        text[last->text_length] = 0;
        return true;
    }
    if (event->kind == ENGINE_EVENT_TOKENS) {
        int32_t *ids = realloc(last->ids, (last->n_ids + event->n_ids) * sizeof(*ids));

        if (!ids)
            return false;
        memcpy(ids + last->n_ids, event->ids, event->n_ids * sizeof(*ids));
        last->ids = ids;
        last->n_ids += event->n_ids;
        return true;
    }
    return false;
}

void mailbox_emit(Mailbox *mailbox, EngineEvent *event)
{
    EventNode *node = (EventNode *)(void *)event;
    uint64_t one = 1;

    (void)pthread_mutex_lock(&mailbox->lock);
    if (mailbox->last_event && merge(&mailbox->last_event->event, event)) {
        engine_event_free(event);
    } else {
        node->next = NULL;
        if (mailbox->last_event)
            mailbox->last_event->next = node;
        else
            mailbox->first_event = node;
        mailbox->last_event = node;
        /* The counter cannot overflow: it is reset whenever the list runs empty. */
        (void)!write(mailbox->event_fd, &one, sizeof(one));
    }
    (void)pthread_mutex_unlock(&mailbox->lock);
}

EngineEvent *mailbox_next_event(Mailbox *mailbox)
{
    EventNode *node;
    uint64_t n;

    (void)pthread_mutex_lock(&mailbox->lock);
    node = mailbox->first_event;
    if (node) {
        mailbox->first_event = node->next;
        node->next = NULL;
    }
    if (!mailbox->first_event) {
        mailbox->last_event = NULL;
        (void)!read(mailbox->event_fd, &n, sizeof(n));
    }
    (void)pthread_mutex_unlock(&mailbox->lock);
    return node ? &node->event : NULL;
}

int mailbox_event_fd(const Mailbox *mailbox)
{
    return mailbox->event_fd;
}

/* ---- heartbeat ------------------------------------------------------------------------------------------------------------- */

void mailbox_allow(Mailbox *mailbox, uint64_t until_usec)
{
    (void)pthread_mutex_lock(&mailbox->lock);
    mailbox->beats++;
    mailbox->allowed_until_usec = until_usec;
    (void)pthread_mutex_unlock(&mailbox->lock);
}

uint64_t mailbox_heartbeat(Mailbox *mailbox)
{
    uint64_t beats;

    (void)pthread_mutex_lock(&mailbox->lock);
    if ((mailbox->waiting && !mailbox->first_command) || now_usec() < mailbox->allowed_until_usec)
        mailbox->beats++;
    beats = mailbox->beats;
    (void)pthread_mutex_unlock(&mailbox->lock);
    return beats;
}
