#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Token ids from bytes: numbers as text, or int32 little-endian. */

#include "daemon/bus/call-options.h"

/* CALL_IDS_AUTO: text when every byte is a digit, blank or comma, else int32.  *ret is the caller's to free.  -EINVAL names the place. */
int ids_parse(const char *bytes, size_t n_bytes, CallIdsFormat format, int32_t **ret, size_t *ret_n, ErrorDetail *reterr);
