/* Makes the named files durable, twice: waiting, and with a call for each. usage: sync FILE… */
#define _POSIX_C_SOURCE 200809L /* O_CLOEXEC */
#include "ferry_sync.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void done(void *context, size_t index, int err) {
    char **names = context;
    printf("%s: %s\n", names[index], err ? strerror(err) : "durable");
}

int main(int argc, char **argv) {
    size_t n = argc - 1;
    int fds[64], errs[64];
    ferry_sync_pending *pending;
    if (argc < 2 || n > 64)
        return 2;
    for (size_t i = 0; i < n; i++)
        fds[i] = open(argv[i + 1], O_RDONLY | O_CLOEXEC); /* -1 is answered with EBADF */

    int failed = ferry_sync_files(fds, n, errs, FERRY_SYNC_DATA);
    printf("%d of %zu failed\n", failed, n);

    int started = ferry_sync_start(fds, n, 0, done, argv + 1, &pending);
    if (started < 0) {
        fprintf(stderr, "cannot start: %s\n", strerror(-started));
        return 1;
    }
    /* Other work goes here. */
    return ferry_sync_wait(pending) == failed ? 0 : 1;
}
