/* Makes many open files durable at a time: as one commit on FerryFS, with many fsyncs in flight on other file systems.
 * Link with -lferry_sync. The ioctl itself is at the end, for those who need no library. docs/bulk-sync.md says more. */
#ifndef FERRY_SYNC_H
#define FERRY_SYNC_H

#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A flag: as fdatasync(2), times may be left out. */
#define FERRY_SYNC_DATA 1u

/* Makes n open files (and directories) durable and waits for it. errs, unless it is NULL, gets an errno or 0 for each, what fsync(2) would
 * have said of it. Returns how many failed, or a negative errno if nothing was tried. */
int ferry_sync_files(const int *fds, size_t n, int *errs, unsigned flags);

/* A sync that was started and not waited for. */
typedef struct ferry_sync_pending ferry_sync_pending;

/* Told once for each file: its place in fds, and an errno or 0. */
typedef void (*ferry_sync_done)(void *context, size_t index, int err);

/* The same without waiting: one thread is started for all the files, which calls done for each, in any order. fds is copied; each file must stay
 * open until it is answered. Returns 0, and a pending sync that must be waited for; or a negative errno, and nothing will be called. */
int ferry_sync_start(const int *fds, size_t n, unsigned flags, ferry_sync_done done, void *context,
                     ferry_sync_pending **pending);

/* Waits until every file was answered, and frees pending. Returns how many failed, or a negative errno. Not to be called by done. */
int ferry_sync_wait(ferry_sync_pending *pending);

/* The ioctl, on any file or directory of a FerryFS mount. In: the number of files, flags, and inode numbers of regular files that the calling
 * user holds open. Out: in each number's place, 0 (durable) or an errno; then only fsync(2) on the file's descriptor says what is. */
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
