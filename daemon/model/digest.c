/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 of a model file. */

#include "daemon/model/digest.h"
#include "daemon/model/state-file.h"
#include "quant/base/log.h"

#include <openssl/evp.h>
#include <string.h>

static const StateKind DIGEST_KIND = {"digests", {'L', 'E', 'A', 'T', 'S', 'H', 'A', '2'}, 1};

typedef struct DigestEntry {
    GgufIdentity identity;
    uint8_t digest[DIGEST_BYTES];
} DigestEntry;

void digest_to_hex(const uint8_t digest[static DIGEST_BYTES], char ret[static 2 * DIGEST_BYTES + 1])
{
    for (size_t i = 0; i < DIGEST_BYTES; i++)
        (void)snprintf(ret + 2 * i, 3, "%02x", digest[i]);
}

static int hash(const Gguf *gguf, uint8_t ret[static DIGEST_BYTES])
{
    if (EVP_Digest(gguf_file_data(gguf), gguf_file_bytes(gguf), ret, NULL, EVP_sha256(), NULL) != 1)
        return error_origin(-ENOMEM);
    return 0;
}

int digest_of_file(const Gguf *gguf, const char *state_dir, uint8_t ret[static DIGEST_BYTES])
{
    DigestEntry entry = {0}, stored;
    char name[64];
    int r;

    if (!state_dir || !gguf_identity(gguf, &entry.identity))
        return hash(gguf, ret);
    (void)snprintf(name, sizeof(name), "%llx-%llx", (unsigned long long)entry.identity.device,
                   (unsigned long long)entry.identity.inode);
    if (state_file_read(state_dir, &DIGEST_KIND, name, &stored, sizeof(stored)) == 0 &&
        memcmp(&stored.identity, &entry.identity, sizeof(entry.identity)) == 0) {
        memcpy(ret, stored.digest, DIGEST_BYTES);
        return 0;
    }
    r = hash(gguf, entry.digest);
    if (r)
        return r;
    memcpy(ret, entry.digest, DIGEST_BYTES);
    r = state_file_write(state_dir, &DIGEST_KIND, name, &entry, sizeof(entry));
    if (r)
        log_warning("cannot remember the model's digest in '%s': %s, ignoring", state_dir, strerror(-r));
    return 0;
}

int digest_from_hex(const char *hex, uint8_t ret[static DIGEST_BYTES])
{
    static const char digits[] = "0123456789abcdef";

    if (strlen(hex) != 2 * DIGEST_BYTES || strspn(hex, digits) != 2 * DIGEST_BYTES)
        return -EINVAL;
    for (size_t i = 0; i < DIGEST_BYTES; i++)
        ret[i] = (uint8_t)((strchr(digits, hex[2 * i]) - digits) << 4 | (strchr(digits, hex[2 * i + 1]) - digits));
    return 0;
}
