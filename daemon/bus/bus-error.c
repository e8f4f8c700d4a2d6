/* SPDX-License-Identifier: Apache-2.0 */
/* Errors of the bus. */

#include "daemon/bus/bus-error.h"
#include "daemon/bus/bus-text.h"

#include <assert.h>
#include <stdarg.h>

typedef struct BusErrorEntry {
    const char *name;
    int error;
    const char *text; /* when the engine gave none */
} BusErrorEntry;

static const BusErrorEntry bus_errors[ENGINE_RESULT_X_MAX] = {
    [ENGINE_RESULT_DONE] = {"done", 0, "done"},
    [ENGINE_RESULT_CANCELLED] = {BUS_ERROR_PREFIX "Cancelled", ECANCELED, "the job was cancelled"},
    [ENGINE_RESULT_NO_SUCH_MODEL] = {BUS_ERROR_PREFIX "NoSuchModel", ENOENT, "no such model is configured"},
    [ENGINE_RESULT_NO_SUCH_SESSION] = {BUS_ERROR_NO_SUCH_SESSION, ENOENT, "no such session"},
    [ENGINE_RESULT_NO_SUCH_JOB] = {BUS_ERROR_NO_SUCH_JOB, ENOENT, "no such job"},
    [ENGINE_RESULT_NO_SUCH_SERVICE] = {BUS_ERROR_PREFIX "NoSuchService", ENOENT, "no such service is configured"},
    [ENGINE_RESULT_MODEL_NOT_INSTALLED] = {BUS_ERROR_PREFIX "ModelNotInstalled", ENOENT, "the model's file is not there"},
    [ENGINE_RESULT_DIGEST_MISMATCH] = {BUS_ERROR_PREFIX "DigestMismatch", EBADMSG, "it was saved with another model or form of the cache"},
    [ENGINE_RESULT_MODEL_CORRUPT] = {BUS_ERROR_PREFIX "ModelCorrupt", EBADMSG, "the model's file is damaged"},
    [ENGINE_RESULT_UNSUPPORTED_MODEL] = {BUS_ERROR_PREFIX "UnsupportedModel", EOPNOTSUPP, "this kind of model is not supported"},
    [ENGINE_RESULT_OUT_OF_DEVICE_MEMORY] = {BUS_ERROR_PREFIX "OutOfDeviceMemory", ENOSPC, "the device's memory budget is too small"},
    [ENGINE_RESULT_OUT_OF_MEMORY] = {BUS_ERROR_PREFIX "OutOfMemory", ENOMEM, "the host's memory is too small"},
    [ENGINE_RESULT_DEVICE_LOST] = {BUS_ERROR_PREFIX "DeviceLost", ENODEV, "the device was lost"},
    [ENGINE_RESULT_DEVICE_HUNG] = {BUS_ERROR_PREFIX "DeviceHung", EIO, "the device does not answer"},
    [ENGINE_RESULT_NO_DEVICE] = {SD_BUS_ERROR_NOT_SUPPORTED, EOPNOTSUPP, "there is no OpenCL device"},
    [ENGINE_RESULT_CONTEXT_EXCEEDED] = {BUS_ERROR_PREFIX "ContextExceeded", EMSGSIZE, "the prompt is longer than the context"},
    [ENGINE_RESULT_SESSION_BUSY] = {BUS_ERROR_PREFIX "SessionBusy", EBUSY, "the session has a job already"},
    [ENGINE_RESULT_QUEUE_FULL] = {BUS_ERROR_PREFIX "QueueFull", EAGAIN, "the queue is full, try again later"},
    [ENGINE_RESULT_TEMPLATE_FAILED] = {BUS_ERROR_PREFIX "TemplateFailed", EBADMSG, "the chat template failed"},
    [ENGINE_RESULT_DEADLINE_EXCEEDED] = {BUS_ERROR_PREFIX "DeadlineExceeded", ETIME, "the deadline has passed"},
    [ENGINE_RESULT_SLOW_READER] = {BUS_ERROR_PREFIX "SlowReader", EPIPE, "the reader let its stream stay full"},
    [ENGINE_RESULT_INVALID_ARGS] = {SD_BUS_ERROR_INVALID_ARGS, EINVAL, "invalid argument"},
    [ENGINE_RESULT_NUMERIC] = {BUS_ERROR_PREFIX "NumericError", EDOM, "the model's output is not finite"},
    [ENGINE_RESULT_SHUTTING_DOWN] = {BUS_ERROR_PREFIX "ShuttingDown", ESHUTDOWN, "the daemon is shutting down"},
    [ENGINE_RESULT_FAILED] = {SD_BUS_ERROR_FAILED, EIO, "internal error"},
};

static const BusErrorEntry *bus_error_entry(EngineResult result)
{
    assert(result >= 0 && result < ENGINE_RESULT_X_MAX && bus_errors[result].name);
    return &bus_errors[result];
}

const char *bus_error_name(EngineResult result)
{
    return bus_error_entry(result)->name;
}

int bus_error_errno(EngineResult result)
{
    return -bus_error_entry(result)->error;
}

EngineResult bus_error_result(int r)
{
    static const struct {
        int error;
        EngineResult result;
    } errnos[] = {
        {0, ENGINE_RESULT_DONE},
        {EINVAL, ENGINE_RESULT_INVALID_ARGS},
        {ENOMEM, ENGINE_RESULT_OUT_OF_MEMORY},
        {ENOENT, ENGINE_RESULT_NO_SUCH_MODEL},
        {EAGAIN, ENGINE_RESULT_QUEUE_FULL},
        {ENOBUFS, ENGINE_RESULT_QUEUE_FULL},
        {EBUSY, ENGINE_RESULT_SESSION_BUSY},
        {ECANCELED, ENGINE_RESULT_CANCELLED},
        {ETIME, ENGINE_RESULT_DEADLINE_EXCEEDED},
        {ESHUTDOWN, ENGINE_RESULT_SHUTTING_DOWN},
    };

    if (r > 0)
        return r < ENGINE_RESULT_X_MAX ? (EngineResult)r : ENGINE_RESULT_FAILED;
    for (size_t i = 0; i < N_ELEMENTS(errnos); i++)
        if (errnos[i].error == -r)
            return errnos[i].result;
    return ENGINE_RESULT_FAILED;
}

int bus_error_set(sd_bus_error *error, EngineResult result, const ErrorDetail *detail)
{
    const BusErrorEntry *entry = bus_error_entry(result);
    ErrorDetail clean = ERROR_DETAIL_NULL;

    if (detail && detail->text[0]) {
        clean = *detail;
        /* A file's name or a tensor's may hold any byte; the bus would drop the connection (F23). */
        bus_text_scrub(clean.text);
    }
    return sd_bus_error_set(error, entry->name, clean.text[0] ? clean.text : entry->text);
}

int bus_error_invalid(sd_bus_error *error, const char *format, ...)
{
    char text[sizeof(((ErrorDetail *)NULL)->text)];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    bus_text_scrub(text);
    return sd_bus_error_set(error, SD_BUS_ERROR_INVALID_ARGS, text);
}
