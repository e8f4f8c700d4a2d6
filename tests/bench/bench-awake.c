/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-awake: keeps every processor from halting until its standard input ends, as it does when the program that started it does.
 *
 * A virtual processor without work halts, and is back tens of microseconds after the interrupt that wakes it, more when the machine below
 * has given it to others.  A step of decoding hands over between threads hundreds of times, so what a bench measures is then mostly how
 * the hypervisor wakes.  Here a thread bound to each processor does nothing at the system's idle priority: whatever else can run runs
 * instead of it at once.  Prints a line when all of them are at work.
 */

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *stay_awake(void *userdata)
{
    pthread_barrier_t *all = userdata;

    if (sched_setscheduler(0, SCHED_IDLE, &(struct sched_param){.sched_priority = 0}) != 0)
        exit(EXIT_FAILURE);
    (void)pthread_barrier_wait(all);
    for (;;)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("" ::: "memory");
#endif
    return NULL;
}

int main(void)
{
    pthread_attr_t attributes;
    pthread_barrier_t all;
    cpu_set_t allowed;
    char byte;

    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || pthread_attr_init(&attributes) != 0 ||
        pthread_barrier_init(&all, NULL, (unsigned)CPU_COUNT(&allowed) + 1) != 0)
        return EXIT_FAILURE;
    for (size_t i = 0; i < CPU_SETSIZE; i++) {
        cpu_set_t one;
        pthread_t thread;

        if (!CPU_ISSET(i, &allowed))
            continue;
        CPU_ZERO(&one);
        CPU_SET(i, &one);
        if (pthread_attr_setaffinity_np(&attributes, sizeof(one), &one) != 0 || pthread_create(&thread, &attributes, stay_awake, &all) != 0)
            return EXIT_FAILURE;
    }
    (void)pthread_barrier_wait(&all);
    if (puts("awake") < 0 || fflush(stdout) != 0)
        return EXIT_FAILURE;
    while (read(STDIN_FILENO, &byte, 1) > 0)
        continue;
    return EXIT_SUCCESS;
}
