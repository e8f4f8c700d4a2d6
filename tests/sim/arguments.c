/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is known of the arguments of kernels.  A driver tells it for programs that it has compiled with -cl-kernel-arg-info; one that comes from a
 * binary often tells nothing (PoCL), so with CLSIM_ARGUMENTS it is written to a file of that folder when the program takes the binary, and found
 * again when it gives it back, in this process or another:
 *     KERNEL INDEX m|v c|w      memory or value, const or written
 */

#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define N_KERNELS 256

uint64_t arguments_hash(const unsigned char *binary, size_t size)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < size; i++)
        hash = (hash ^ binary[i]) * UINT64_C(0x100000001b3);
    return hash ? hash : 1;
}

static void path_of(uint64_t hash, char *path, size_t size)
{
    (void)snprintf(path, size, "%s/%016llx", sim.config.arguments, (unsigned long long)hash);
}

static bool ask_driver(cl_kernel handle, cl_uint index, SimArgument *argument)
{
    cl_kernel_arg_address_qualifier space;
    cl_kernel_arg_type_qualifier type;

    if (sim.next.clGetKernelArgInfo(handle, index, CL_KERNEL_ARG_ADDRESS_QUALIFIER, sizeof(space), &space, NULL) != CL_SUCCESS ||
        sim.next.clGetKernelArgInfo(handle, index, CL_KERNEL_ARG_TYPE_QUALIFIER, sizeof(type), &type, NULL) != CL_SUCCESS)
        return false;
    argument->told = true;
    argument->is_memory = space == CL_KERNEL_ARG_ADDRESS_GLOBAL || space == CL_KERNEL_ARG_ADDRESS_CONSTANT;
    argument->is_const = space == CL_KERNEL_ARG_ADDRESS_CONSTANT || type & CL_KERNEL_ARG_TYPE_CONST;
    return true;
}

static void write_kernel(FILE *file, cl_kernel kernel)
{
    char name[256];
    cl_uint n = 0;

    if (sim.next.clGetKernelInfo(kernel, CL_KERNEL_FUNCTION_NAME, sizeof(name), name, NULL) != CL_SUCCESS ||
        sim.next.clGetKernelInfo(kernel, CL_KERNEL_NUM_ARGS, sizeof(n), &n, NULL) != CL_SUCCESS)
        return;
    for (cl_uint i = 0; i < n; i++) {
        SimArgument argument = {.told = false};

        if (ask_driver(kernel, i, &argument))
            (void)fprintf(file, "%s %u %c %c\n", name, i, argument.is_memory ? 'm' : 'v', argument.is_const ? 'c' : 'w');
    }
}

/* Whole or not at all: others may read it at the same time. */
static void write_file(uint64_t hash, const cl_kernel *kernels, cl_uint n)
{
    char path[512], draft[560];
    FILE *file;

    path_of(hash, path, sizeof(path));
    (void)snprintf(draft, sizeof(draft), "%s.%ld", path, (long)getpid());
    (void)mkdir(sim.config.arguments, 0777);
    file = fopen(draft, "we");
    if (!file)
        return;
    for (cl_uint i = 0; i < n; i++)
        write_kernel(file, kernels[i]);
    if (fclose(file) != 0 || rename(draft, path) != 0)
        (void)unlink(draft);
}

void arguments_store(cl_program program, size_t n_binaries, const size_t *sizes, unsigned char *const *binaries)
{
    cl_kernel kernels[N_KERNELS];
    cl_uint n = 0;

    if (sim.next.clCreateKernelsInProgram(program, N_KERNELS, kernels, &n) != CL_SUCCESS)
        return;
    for (size_t i = 0; i < n_binaries; i++)
        if (binaries[i] && sizes[i] > 0)
            write_file(arguments_hash(binaries[i], sizes[i]), kernels, n);
    for (cl_uint i = 0; i < n; i++)
        (void)sim.next.clReleaseKernel(kernels[i]);
}

static void ask_file(const char *name, cl_uint n, uint64_t known_by, SimArgument *arguments)
{
    char path[512], line[512], kernel[256], space, use;
    unsigned index;
    FILE *file;

    path_of(known_by, path, sizeof(path));
    file = fopen(path, "re");
    if (!file)
        return;
    while (fgets(line, sizeof(line), file))
        if (sscanf(line, "%255s %u %c %c", kernel, &index, &space, &use) == 4 && strcmp(kernel, name) == 0 && index < n) {
            arguments[index].told = true;
            arguments[index].is_memory = space == 'm';
            arguments[index].is_const = use == 'c';
        }
    (void)fclose(file);
}

void arguments_ask(cl_kernel kernel, const char *name, cl_uint n, uint64_t known_by, SimArgument *arguments)
{
    bool told = true;

    for (cl_uint i = 0; i < n && told; i++)
        told = ask_driver(kernel, i, &arguments[i]);
    if (!told && known_by && sim.config.arguments)
        ask_file(name, n, known_by, arguments);
}
