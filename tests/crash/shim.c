/* Between a process and its files: writes down every write and sync, and fails them on demand.
 *
 * SHIM_LOG     file to which one record an event is appended (see shim.py for the layout)
 * SHIM_UNDER   only files under this folder are recorded and failed; sockets are recorded too
 * SHIM_SWITCH  file whose first word fails things while it is there:
 *              enospc, eio-write, eio-sync
 *
 * A write and a sync are recorded when they have ended, the begin of a sync and a write to a
 * socket before they are made. So an order that the log shows held in the kernel as well, and
 * no lock is needed that would hide a race.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static const char *under;
static const char *switch_path;
static int log_fd = -1;

struct header {
    char kind;
    uint32_t path_bytes;
    uint64_t offset;
    uint32_t data_bytes;
} __attribute__((packed));

__attribute__((constructor)) static void begin(void) {
    under = getenv("SHIM_UNDER");
    switch_path = getenv("SHIM_SWITCH");
    const char *path = getenv("SHIM_LOG");
    if (path) log_fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
}

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }
#define REAL(type, name, ...)                                                                    \
    static type (*next)(__VA_ARGS__);                                                            \
    if (!next) *(void **)&next = real(name)

/* The path of fd, if it is one that is watched. */
static int watched(int fd, char *path, size_t size) {
    int saved = errno;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, size - 1);
    errno = saved;
    if (n <= 0) return 0;
    path[n] = 0;
    if (!strncmp(path, "socket:", 7)) return 2;
    return under && !strncmp(path, under, strlen(under));
}

static void note(char kind, const char *path, uint64_t offset, const struct iovec *data, int count) {
    if (log_fd < 0 || count > 60) return;
    struct header head = {kind, (uint32_t)strlen(path), offset, 0};
    struct iovec all[64] = {{&head, sizeof head}, {(void *)path, head.path_bytes}};
    for (int i = 0; i < count; i++) {
        all[i + 2] = data[i];
        head.data_bytes += (uint32_t)data[i].iov_len;
    }
    int saved = errno;
    if (syscall(SYS_writev, log_fd, all, count + 2) < 0) abort();
    errno = saved;
}

static int is_on(const char *word) {
    if (!switch_path) return 0;
    int saved = errno, found = 0;
    char text[32] = "";
    int fd = (int)syscall(SYS_openat, AT_FDCWD, switch_path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (syscall(SYS_read, fd, text, sizeof text - 1) > 0)
            found = !strncmp(text, word, strlen(word));
        syscall(SYS_close, fd);
    }
    errno = saved;
    return found;
}

static int write_fails(int fd, uint64_t end) {
    struct stat now;
    if (is_on("eio-write")) return errno = EIO;
    if (is_on("enospc") && !fstat(fd, &now) && end > (uint64_t)now.st_size) return errno = ENOSPC;
    return 0;
}

/* --- files ------------------------------------------------------------------------------- */

static ssize_t do_pwrite(int fd, const void *data, size_t count, off_t offset) {
    char path[4096];
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
    if (watched(fd, path, sizeof path) != 1) return next(fd, data, count, offset);
    if (write_fails(fd, (uint64_t)offset + count)) return -1;
    ssize_t n = next(fd, data, count, offset);
    if (n > 0) note('W', path, (uint64_t)offset, &(struct iovec){(void *)data, (size_t)n}, 1);
    return n;
}
ssize_t pwrite(int f, const void *d, size_t n, off_t o) { return do_pwrite(f, d, n, o); }
ssize_t pwrite64(int f, const void *d, size_t n, off64_t o) { return do_pwrite(f, d, n, o); }

static int do_sync(const char *name, int fd) {
    char path[4096];
    int (*next)(int);
    *(void **)&next = real(name);
    if (watched(fd, path, sizeof path) != 1) return next(fd);
    if (is_on("eio-sync")) {
        errno = EIO;
        return -1;
    }
    note('S', path, 0, NULL, 0);
    int result = next(fd);
    if (!result) note('F', path, 0, NULL, 0);
    return result;
}
int fsync(int fd) { return do_sync("fsync", fd); }
int fdatasync(int fd) { return do_sync("fdatasync", fd); }

static int do_truncate(int fd, off_t size) {
    char path[4096];
    REAL(int, "ftruncate64", int, off_t);
    int is = watched(fd, path, sizeof path);
    int result = next(fd, size);
    if (is == 1 && !result) note('T', path, (uint64_t)size, NULL, 0);
    return result;
}
int ftruncate(int fd, off_t size) { return do_truncate(fd, size); }
int ftruncate64(int fd, off64_t size) { return do_truncate(fd, size); }

int unlink(const char *name) {
    REAL(int, "unlink", const char *);
    int result = next(name);
    if (!result && under && !strncmp(name, under, strlen(under))) note('U', name, 0, NULL, 0);
    return result;
}

static int do_fallocate(int fd, off_t offset, off_t length) {
    REAL(int, "posix_fallocate64", int, off_t, off_t);
    return is_on("enospc") ? ENOSPC : next(fd, offset, length);
}
int posix_fallocate(int fd, off_t o, off_t n) { return do_fallocate(fd, o, n); }
int posix_fallocate64(int fd, off64_t o, off64_t n) { return do_fallocate(fd, o, n); }

int statvfs(const char *path, struct statvfs *found) {
    REAL(int, "statvfs", const char *, struct statvfs *);
    int result = next(path, found);
    if (!result && is_on("enospc")) found->f_bavail = found->f_bfree = 0;
    return result;
}
int statvfs64(const char *path, struct statvfs64 *found) {
    REAL(int, "statvfs64", const char *, struct statvfs64 *);
    int result = next(path, found);
    if (!result && is_on("enospc")) found->f_bavail = found->f_bfree = 0;
    return result;
}

/* --- sockets: what is sent before it is, what is received after it was --------------------- */

static void sending(int fd, const struct iovec *data, int count) {
    char path[4096];
    if (watched(fd, path, sizeof path) == 2) note('R', path, 0, data, count);
}
static void received(int fd, const void *data, ssize_t n) {
    char path[4096];
    if (n > 0 && watched(fd, path, sizeof path) == 2)
        note('G', path, 0, &(struct iovec){(void *)data, (size_t)n}, 1);
}

ssize_t write(int fd, const void *data, size_t count) {
    REAL(ssize_t, "write", int, const void *, size_t);
    sending(fd, &(struct iovec){(void *)data, count}, 1);
    return next(fd, data, count);
}
ssize_t writev(int fd, const struct iovec *data, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    sending(fd, data, count);
    return next(fd, data, count);
}
ssize_t send(int fd, const void *data, size_t count, int flags) {
    REAL(ssize_t, "send", int, const void *, size_t, int);
    sending(fd, &(struct iovec){(void *)data, count}, 1);
    return next(fd, data, count, flags);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(ssize_t, "sendmsg", int, const struct msghdr *, int);
    sending(fd, message->msg_iov, (int)message->msg_iovlen);
    return next(fd, message, flags);
}
ssize_t read(int fd, void *data, size_t count) {
    REAL(ssize_t, "read", int, void *, size_t);
    ssize_t n = next(fd, data, count);
    received(fd, data, n);
    return n;
}
ssize_t recv(int fd, void *data, size_t count, int flags) {
    REAL(ssize_t, "recv", int, void *, size_t, int);
    ssize_t n = next(fd, data, count, flags);
    received(fd, data, n);
    return n;
}
