/* Counts the file system calls that touch one folder, and makes one of them fail or kills the process there.
 * Preloaded before the C library (LD_PRELOAD), through which Rust's standard library makes all of these calls.
 *
 *   SHIM_FOLDER  counts calls on paths that contain this string, from 1
 *   SHIM_LOG     file that gets a line per call: its number, its name, the path
 *   SHIM_AT      number of the call that fails
 *   SHIM_HOW     "kill", or the errno it fails with; a killed write has written half of its bytes
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int counted;

static int touches(const char *path) {
    const char *folder = getenv("SHIM_FOLDER");
    return folder && path && strstr(path, folder) != NULL;
}

static void log_call(const char *name, const char *path, int number) {
    const char *log = getenv("SHIM_LOG");
    char line[4600];
    if (!log) return;
    int fd = REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    int length = snprintf(line, sizeof line, "%d %s %s\n", number, name, path);
    if (fd >= 0) {
        if (REAL(write)(fd, line, length) < 0) abort();
        REAL(close)(fd);
    }
}

/* Returns 0 to let the call proceed; otherwise sets errno, and the call fails. With "kill", kills the process
 * after half of a write. */
static int fault(const char *name, const char *path, int fd, const void *bytes, size_t length) {
    const char *at = getenv("SHIM_AT"), *how = getenv("SHIM_HOW");
    if (!touches(path)) return 0;
    int number = __atomic_add_fetch(&counted, 1, __ATOMIC_SEQ_CST);
    log_call(name, path, number);
    if (!at || !how || number != atoi(at)) return 0;
    if (strcmp(how, "kill") == 0) {
        if (bytes && REAL(write)(fd, bytes, length / 2) < 0) abort();
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    errno = atoi(how);
    return -1;
}

static int fault_at(const char *name, int fd, const char *below, const void *bytes, size_t length) {
    char link[64], path[4400];
    if (below && (below[0] == '/' || fd == AT_FDCWD)) return fault(name, below, fd, NULL, 0);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, 4000);
    if (size < 0) return 0;
    path[size] = 0;
    if (below) {
        strcat(path, "/");
        strncat(path, below, 300);
    }
    return fault(name, path, fd, bytes, length);
}

#define MODE                                     \
    mode_t mode = 0;                             \
    if (flags & (O_CREAT | O_TMPFILE)) {         \
        va_list list;                            \
        va_start(list, flags);                   \
        mode = va_arg(list, mode_t);             \
        va_end(list);                            \
    }

int open(const char *path, int flags, ...) {
    MODE
    return fault("open", path, -1, NULL, 0) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE
    return fault("open", path, -1, NULL, 0) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int fd, const char *path, int flags, ...) {
    MODE
    return fault_at("openat", fd, path, NULL, 0) ? -1 : REAL(openat)(fd, path, flags, mode);
}
int openat64(int fd, const char *path, int flags, ...) {
    MODE
    return fault_at("openat", fd, path, NULL, 0) ? -1 : REAL(openat64)(fd, path, flags, mode);
}
ssize_t read(int fd, void *bytes, size_t length) {
    return fault_at("read", fd, NULL, NULL, 0) ? -1 : REAL(read)(fd, bytes, length);
}
ssize_t write(int fd, const void *bytes, size_t length) {
    return fault_at("write", fd, NULL, bytes, length) ? -1 : REAL(write)(fd, bytes, length);
}
ssize_t pwrite64(int fd, const void *bytes, size_t length, off64_t at) {
    return fault_at("pwrite", fd, NULL, NULL, 0) ? -1 : REAL(pwrite64)(fd, bytes, length, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return fault_at("writev", fd, NULL, NULL, 0) ? -1 : REAL(writev)(fd, parts, count);
}
ssize_t copy_file_range(int from, off64_t *a, int to, off64_t *b, size_t length, unsigned flags) {
    return fault_at("copy_file_range", to, NULL, NULL, 0) ? -1
                                                          : REAL(copy_file_range)(from, a, to, b, length, flags);
}
int ftruncate64(int fd, off64_t length) {
    return fault_at("ftruncate", fd, NULL, NULL, 0) ? -1 : REAL(ftruncate64)(fd, length);
}
int fsync(int fd) { return fault_at("fsync", fd, NULL, NULL, 0) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fault_at("fdatasync", fd, NULL, NULL, 0) ? -1 : REAL(fdatasync)(fd); }
int rename(const char *from, const char *to) {
    return fault("rename", touches(to) ? to : from, -1, NULL, 0) ? -1 : REAL(rename)(from, to);
}
int link(const char *from, const char *to) { return fault("link", to, -1, NULL, 0) ? -1 : REAL(link)(from, to); }
int unlink(const char *path) { return fault("unlink", path, -1, NULL, 0) ? -1 : REAL(unlink)(path); }
int unlinkat(int fd, const char *path, int flags) {
    return fault_at("unlinkat", fd, path, NULL, 0) ? -1 : REAL(unlinkat)(fd, path, flags);
}
int rmdir(const char *path) { return fault("rmdir", path, -1, NULL, 0) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) {
    return fault("mkdir", path, -1, NULL, 0) ? -1 : REAL(mkdir)(path, mode);
}
