/* Injects one fault into the file calls of a process below one folder; loaded with LD_PRELOAD (Linux, 64 bits).
 *
 * Each intercepted function reports its call, by a name such as "write", and the path of its file. A process and its
 * children count the calls of the armed fault together, in a file that they map; the calls from the n-th on, or only
 * that one, fail, transfer fewer bytes or are delayed. Reads its orders from the environment:
 *
 *   TORTURE_ROOT   the folder, absolute and without links; nothing happens without it
 *   TORTURE_LOG    a file to which a line is appended for each call, or with a fault, for each call that it changes
 *   TORTURE_FAULT  "<call> <n> <others> <change> <delay in ms> <pattern>": change the n-th such call whose path below
 *                  the folder matches the pattern (fnmatch, `*` matches `/` too). <others> says what changes after it:
 *                  "once" nothing, "same" the same calls of such paths, ",read,write," these calls of all paths below
 *                  the folder. <change> is the number of an error, 0 for none, or -1 for half of the bytes.
 *
 * Lets go what libc does within itself (fopen, remove, tmpfile) and what bypasses it (sendfile, io_uring).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if __SIZEOF_LONG__ != 8
#error "the system calls are those of a 64-bit system"
#endif

enum { HALF = -1 };

static struct {
  char root[PATH_MAX], call[16], others[128], pattern[PATH_MAX];
  size_t root_length;
  long nth;
  int log, change, delay_ms, has_fault, is_armed;
  _Atomic long *count;
} orders;

/* Reads the orders; called when a process starts, and by a process that has changed its environment. */
__attribute__((constructor)) void torture_arm(void) {
  const char *root = getenv("TORTURE_ROOT"), *log = getenv("TORTURE_LOG"), *fault = getenv("TORTURE_FAULT");
  orders.is_armed = orders.has_fault = orders.change = orders.delay_ms = 0;
  if (!root || !log || strlen(root) >= sizeof orders.root) return;
  orders.root_length = strlen(strcpy(orders.root, root));
  orders.log = (int)syscall(SYS_openat, AT_FDCWD, log, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fault) {
    char counter[PATH_MAX];
    snprintf(counter, sizeof counter, "%s.count", log);
    int file = (int)syscall(SYS_openat, AT_FDCWD, counter, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    syscall(SYS_ftruncate, file, sizeof *orders.count);
    orders.count = (void *)syscall(SYS_mmap, 0, sizeof *orders.count, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    orders.has_fault = sscanf(fault, "%15s %ld %127s %d %d %4095s", orders.call, &orders.nth, orders.others,
                                  &orders.change, &orders.delay_ms, orders.pattern) == 6;
    if (!orders.has_fault || (void *)orders.count == MAP_FAILED) abort();
  }
  orders.is_armed = 1;
}

static void note(const char *call, const char *path) {
  char line[PATH_MAX + 32];
  int length = snprintf(line, sizeof line, "%s\t%s\n", call, path);
  syscall(SYS_write, orders.log, line, length);
}

/* Returns whether this call is to be changed, and counts it. */
static int is_hit(const char *call, const char *path) {
  if (!strcmp(call, orders.call) && !fnmatch(orders.pattern, path, 0)) {
    long number = ++*orders.count;
    if (number == orders.nth) return 1;
    if (!strcmp(orders.others, "same")) return number > orders.nth;
  }
  char listed[20];
  snprintf(listed, sizeof listed, ",%s,", call);
  return *orders.count > orders.nth - 1 && strstr(orders.others, listed) != NULL;
}

/* Delays a call if so ordered, and returns what to change: the number of an error, HALF, or 0. */
static int change_of(const char *call, const char *path) {
  if (strncmp(path, orders.root, orders.root_length) || path[orders.root_length] != '/') return 0;
  const char *below = path + orders.root_length + 1;
  if (orders.has_fault && !is_hit(call, below)) return 0;
  note(call, below);
  struct timespec left = {orders.delay_ms / 1000, orders.delay_ms % 1000 * 1000000L};
  while (orders.delay_ms && nanosleep(&left, &left)) continue;
  return orders.change;
}

static ssize_t read_link(const char *link, char *path) {
  ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  path[length > 0 ? length : 0] = 0;
  return length;
}

static int on_file(const char *call, int file) {
  if (!orders.is_armed) return 0;
  int before = errno;
  char link[32], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  int change = read_link(link, path) > 0 ? change_of(call, path) : 0;
  errno = before;
  return change;
}

static int on_path(const char *call, int folder, const char *name) {
  if (!orders.is_armed || !name) return 0;
  if (!*name) return on_file(call, folder);
  int before = errno;
  char link[32] = "/proc/self/cwd", at[PATH_MAX] = "", path[2 * PATH_MAX];
  if (folder != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  if (*name != '/') read_link(link, at);
  snprintf(path, sizeof path, *name == '/' ? "%s%s" : "%s/%s", at, name);
  int change = change_of(call, path);
  errno = before;
  return change;
}

#define FAIL_IF(found) \
  int change = (found); \
  if (change > 0) return errno = change, -1

static int open_file(int folder, const char *name, int flags, mode_t mode) {
  FAIL_IF(on_path(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? "create" : "open", folder, name));
  return (int)syscall(SYS_openat, folder, name, flags, mode);
}

#define OPEN(folder) \
  va_list rest; \
  va_start(rest, flags); \
  mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
  va_end(rest); \
  return open_file(folder, name, flags, mode)
int open(const char *name, int flags, ...) { OPEN(AT_FDCWD); }
int open64(const char *name, int flags, ...) { OPEN(AT_FDCWD); }
int openat(int folder, const char *name, int flags, ...) { OPEN(folder); }
int openat64(int folder, const char *name, int flags, ...) { OPEN(folder); }

#define PLAIN(name, call, bytes, ...) \
  FAIL_IF(on_file(call, file)); \
  if (change == HALF) bytes = (bytes + 1) / 2; \
  return syscall(SYS_##name, file, __VA_ARGS__)
#define VECTOR(name, call, ...) \
  FAIL_IF(on_file(call, file)); \
  struct iovec part; \
  if (change == HALF && count > 0) part = half_of(parts, count), parts = &part, count = 1; \
  return syscall(SYS_##name, file, parts, count, ##__VA_ARGS__)
#define ON_FILE(name, call, ...) \
  FAIL_IF(on_file(call, file)); \
  return (int)syscall(SYS_##name, file, ##__VA_ARGS__)
#define ON_PATH(name, call, folder, path, ...) \
  FAIL_IF(on_path(call, folder, path)); \
  return (int)syscall(SYS_##name, __VA_ARGS__)

/* Half of a vector is half of its first part that is not empty. */
static struct iovec half_of(const struct iovec *parts, int count) {
  while (count > 1 && !parts->iov_len) parts++, count--;
  return (struct iovec){parts->iov_base, (parts->iov_len + 1) / 2};
}

typedef const struct iovec Part;
ssize_t read(int file, void *data, size_t size) { PLAIN(read, "read", size, data, size); }
ssize_t write(int file, const void *data, size_t size) { PLAIN(write, "write", size, data, size); }
ssize_t readv(int file, Part *parts, int count) { VECTOR(readv, "read"); }
ssize_t writev(int file, Part *parts, int count) { VECTOR(writev, "write"); }
#define SIZED(bits, v2) \
  ssize_t pread##bits(int file, void *data, size_t size, off_t at) { PLAIN(pread64, "read", size, data, size, at); } \
  ssize_t pwrite##bits(int file, const void *data, size_t size, off_t at) { \
    PLAIN(pwrite64, "write", size, data, size, at); \
  } \
  ssize_t preadv##bits(int file, Part *parts, int count, off_t at) { VECTOR(preadv, "read", at, 0L); } \
  ssize_t pwritev##bits(int file, Part *parts, int count, off_t at) { VECTOR(pwritev, "write", at, 0L); } \
  ssize_t preadv##v2(int file, Part *parts, int count, off_t at, int how) { VECTOR(preadv2, "read", at, 0L, how); } \
  ssize_t pwritev##v2(int file, Part *parts, int count, off_t at, int how) { VECTOR(pwritev2, "write", at, 0L, how); } \
  int ftruncate##bits(int file, off_t size) { ON_FILE(ftruncate, "truncate", size); } \
  int truncate##bits(const char *path, off_t size) { ON_PATH(truncate, "truncate", AT_FDCWD, path, path, size); } \
  void *mmap##bits(void *where, size_t size, int rights, int flags, int file, off_t at) { \
    int change = flags & MAP_ANONYMOUS ? 0 : on_file("mmap", file); \
    if (change > 0) return errno = change, MAP_FAILED; \
    return (void *)syscall(SYS_mmap, where, size, rights, flags, file, at); \
  }
SIZED(, 2)
SIZED(64, 64v2)

int fsync(int file) { ON_FILE(fsync, "fsync"); }
int fdatasync(int file) { ON_FILE(fdatasync, "fsync"); }

/* Only a close of a file that may have been written fails; it has closed the file, as on Linux. */
int close(int file) {
  int is_written = (syscall(SYS_fcntl, file, F_GETFL) & O_ACCMODE) != O_RDONLY;
  int change = is_written ? on_file("close", file) : 0;
  int result = (int)syscall(SYS_close, file);
  return change > 0 && !result ? (errno = change, -1) : result;
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  ON_PATH(renameat2, "rename", to, new, from, old, to, new, flags);
}
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }
int unlinkat(int folder, const char *path, int how) { ON_PATH(unlinkat, "unlink", folder, path, folder, path, how); }
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int folder, const char *path, mode_t mode) { ON_PATH(mkdirat, "mkdir", folder, path, folder, path, mode); }
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* On 64 bits, the structures of stat and stat64, and of the kernel, are the same. */
int statx(int folder, const char *restrict path, int flags, unsigned mask, struct statx *restrict found) {
  ON_PATH(statx, "stat", folder, path, folder, path, flags, mask, found);
}
static int look(int folder, const char *path, void *found, int flags) {
  ON_PATH(newfstatat, "stat", folder, path, folder, path, found, flags);
}
#define LOOKS(bits) \
  int stat##bits(const char *restrict path, struct stat##bits *restrict to) { \
    return look(AT_FDCWD, path, to, 0); \
  } \
  int lstat##bits(const char *restrict path, struct stat##bits *restrict to) { \
    return look(AT_FDCWD, path, to, AT_SYMLINK_NOFOLLOW); \
  } \
  int fstat##bits(int file, struct stat##bits *to) { return look(file, "", to, AT_EMPTY_PATH); } \
  int fstatat##bits(int at, const char *restrict path, struct stat##bits *restrict to, int flags) { \
    return look(at, path, to, flags); \
  } \
  int __xstat##bits(int v, const char *path, struct stat##bits *to) { return (void)v, stat##bits(path, to); } \
  int __lxstat##bits(int v, const char *path, struct stat##bits *to) { return (void)v, lstat##bits(path, to); } \
  int __fxstat##bits(int v, int file, struct stat##bits *to) { return (void)v, fstat##bits(file, to); } \
  int __fxstatat##bits(int v, int at, const char *path, struct stat##bits *to, int flags) { \
    return (void)v, fstatat##bits(at, path, to, flags); \
  }
LOOKS()
LOOKS(64)

#define LIST(name, type, found, argument) \
  DIR *name(type argument) { \
    DIR *(*next)(type) = (DIR * (*)(type)) dlsym(RTLD_NEXT, #name); \
    int change = found; \
    return change > 0 ? (errno = change, NULL) : next(argument); \
  }
LIST(opendir, const char *, on_path("list", AT_FDCWD, path), path)
LIST(fdopendir, int, on_file("list", file), file)
