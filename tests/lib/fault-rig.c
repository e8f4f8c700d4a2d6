/* SPDX-License-Identifier: Apache-2.0 */
/* What the fault tests have in common. */

#include "tests/lib/fault-rig.h"
#include "tests/lib/fault-script.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* A device that was lost is opened again, thousands of times: PoCL takes longer to see that it has compiled a source than to load a binary.
 * Making binaries takes minutes, too long for a few cases. */
static void keep_programs(void)
{
    const char *drivers = getenv("POCL_CACHE_DIR");
    char path[4096];

    if (!getenv("LEAT_SOAK") || !drivers || getenv("LEAT_TEST_CACHE"))
        return;
    (void)snprintf(path, sizeof(path), "%s/../fault-programs", drivers);
    (void)mkdir(path, 0700);
    (void)setenv("LEAT_TEST_CACHE", path, 1);
    (void)setenv("CLSIM_ARGUMENTS", path, 1);
}

void fault_rig_begin(void)
{
    keep_programs();
    (void)setenv("LEAT_FAULT_SEED", "1", 0);
    (void)printf("LEAT_FAULT_SEED=%s\n", getenv("LEAT_FAULT_SEED"));
}

uint32_t fault_rig_seed(void)
{
    return (uint32_t)strtoul(getenv("LEAT_FAULT_SEED"), NULL, 10);
}

uint32_t fault_rig_stride(uint32_t n, uint32_t wanted)
{
    const char *slices = getenv("LEAT_SOAK_SLICES");

    if (getenv("LEAT_SOAK"))
        return slices ? MAX((uint32_t)strtoul(slices, NULL, 10), 1u) : 1;
    return n <= wanted ? 1 : n / wanted;
}

static bool is_same(const FaultLive *a, const FaultLive *b)
{
    return a->objects == b->objects && a->blocks == b->blocks && a->mapped_bytes == b->mapped_bytes &&
           a->descriptors == b->descriptors;
}

void fault_rig_check_none_left(const FaultLive *none, uint64_t n_known)
{
    FaultLive live;

    /* The last callback of a driver may come a little later, and lets go of what it was given. */
    for (int i = 0; i < 2000 && (fault_live(&live), !is_same(none, &live)); i++)
        (void)usleep(1000);
    if (!is_same(none, &live)) {
        fault_print_blocks(n_known);
        script_fail(__FILE__, __LINE__,
                    "left behind: %lld objects, %lld blocks, %lld mapped bytes, %lld descriptors",
                    (long long)(live.objects - none->objects), (long long)(live.blocks - none->blocks),
                    (long long)(live.mapped_bytes - none->mapped_bytes),
                    (long long)(live.descriptors - none->descriptors));
    }
}
