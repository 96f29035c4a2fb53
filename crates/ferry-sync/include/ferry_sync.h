/* Makes many open files durable at a time: as one commit on FerryFS, with many fsyncs in flight on other
 * file systems. Link with -lferry_sync. Programs that need no library find the ioctl itself at the end.
 * See docs/bulk-sync.md. */
#ifndef FERRY_SYNC_H
#define FERRY_SYNC_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A flag: as fdatasync(2), timestamps need not become durable. */
#define FERRY_SYNC_DATA 1u

/* Makes n open files (and directories) durable, and waits until they are. errs, unless it is NULL, gets
 * for each file 0 or the errno of fsync(2). Returns how many failed, or a negative errno if nothing was
 * tried. */
int ferry_sync_files(const int *fds, size_t n, int *errs, unsigned flags);

/* A sync that was started, and that ferry_sync_wait has not ended. */
typedef struct ferry_sync_pending ferry_sync_pending;

/* Called once for each file, with its index in fds and 0 or an errno. */
typedef void (*ferry_sync_done)(void *context, size_t index, int err);

/* As ferry_sync_files, without waiting: starts one thread, which calls done for each file, in any order.
 * fds is copied; each file must stay open until it is answered. Returns 0 and a pending sync, which
 * ferry_sync_wait must end; or a negative errno, and done is never called. */
int ferry_sync_start(const int *fds, size_t n, unsigned flags, ferry_sync_done done, void *context,
                     ferry_sync_pending **pending);

/* Waits until every file was answered, and frees pending. Returns how many failed, or a negative errno.
 * done must not call it. */
int ferry_sync_wait(ferry_sync_pending *pending);

/* The ioctl, on any file or directory of a FerryFS mount. In: the number of files, flags, and inode numbers
 * of regular files that the calling user holds open. Out: in place of each number 0 (durable) or an errno;
 * in that case only fsync(2) of the file's descriptor reports its state. */
#define FERRY_SYNC_FILES_MAX 2000
struct ferry_sync_message {
    uint32_t count;
    uint32_t flags;
    uint64_t files[FERRY_SYNC_FILES_MAX];
};
#define FERRY_SYNC_FILES _IOWR('F', 16, struct ferry_sync_message)

#ifdef __cplusplus
}
#endif

#endif
