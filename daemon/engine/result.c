/* SPDX-License-Identifier: Apache-2.0 */
/* What became of a call, from the codes of the layers below. */

#include "daemon/engine/engine-internal.h"

EngineResult result_from_errno(int r)
{
    switch (-r) {
    case 0:
        return ENGINE_RESULT_DONE;
    case ENOMEM:
        return ENGINE_RESULT_OUT_OF_MEMORY;
    case EINVAL:
        return ENGINE_RESULT_INVALID_ARGS;
    case ENODEV: /* every call after a loss */
        return ENGINE_RESULT_DEVICE_LOST;
    default:
        return ENGINE_RESULT_FAILED;
    }
}

EngineResult result_from_model(int r)
{
    if (r < 0)
        return result_from_errno(r);
    switch ((ModelError)r) {
    case MODEL_E_OK:
        return ENGINE_RESULT_DONE;
    case MODEL_E_NOT_FOUND:
        return ENGINE_RESULT_MODEL_NOT_INSTALLED;
    case MODEL_E_CORRUPT:
        return ENGINE_RESULT_MODEL_CORRUPT;
    case MODEL_E_UNSUPPORTED:
        return ENGINE_RESULT_UNSUPPORTED_MODEL;
    case MODEL_E_DEVICE_MEMORY:
        return ENGINE_RESULT_OUT_OF_DEVICE_MEMORY;
    case MODEL_E_HOST_MEMORY:
        return ENGINE_RESULT_OUT_OF_MEMORY;
    case MODEL_E_DEVICE:
        return ENGINE_RESULT_DEVICE_LOST; /* device_abandon() finds out whether it hangs */
    case MODEL_E_CONTEXT:
        return ENGINE_RESULT_CONTEXT_EXCEEDED;
    }
    return ENGINE_RESULT_FAILED;
}

EngineResult result_from_kv(int r)
{
    if (r < 0)
        return result_from_errno(r);
    switch ((KvError)r) {
    case KV_E_OK:
        return ENGINE_RESULT_DONE;
    case KV_E_DEVICE_MEMORY:
        return ENGINE_RESULT_OUT_OF_DEVICE_MEMORY;
    case KV_E_HOST_MEMORY:
        return ENGINE_RESULT_OUT_OF_MEMORY;
    case KV_E_CONTEXT:
        return ENGINE_RESULT_CONTEXT_EXCEEDED;
    case KV_E_DEVICE:
        return ENGINE_RESULT_DEVICE_LOST;
    case KV_E_ROLLBACK:
        break;
    }
    return ENGINE_RESULT_FAILED;
}

void result_explain(EngineResult result, ErrorDetail *reterr)
{
    const char *text = "it failed, and no reason is known";

    if (reterr->text[0] || result == ENGINE_RESULT_DONE || result == ENGINE_RESULT_CANCELLED)
        return;
    if (result == ENGINE_RESULT_OUT_OF_MEMORY)
        text = "the system has no memory left for it";
    else if (result == ENGINE_RESULT_OUT_OF_DEVICE_MEMORY)
        text = "the device has no memory left for it";
    else if (result == ENGINE_RESULT_DEVICE_LOST || result == ENGINE_RESULT_DEVICE_HUNG)
        text = "the device was lost";
    (void)error_detail_set(reterr, 0, "%s", text);
}
