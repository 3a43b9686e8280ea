/* The handler of the custom call `loopfeed_onednn`, and the team of threads that runs the primitives of oneDNN.

   `handler.py` describes the call and `team.py` does the same in Python, for machines without a compiler;
   `team_library.py` builds this file. Results do not depend on which of them runs, since both run the same tasks.
   Nothing here calls Python, except `prepare` at the first call of an operation.

   The team is the thread that XLA calls and the threads of XLA's pool, which the program's other operations use too:
   these look for work for a moment before they sleep, so they are there at once, and with threads of our own there
   would be more than cores. None of them has to come: what they do not take the caller runs. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

enum { OPERAND = 0, RESULT = 1, ARENA = 2, ALIGNED = 64, MESSAGE_BYTES = 1024 };

/* The structures that `compiled.py` fills in. */
typedef struct {
  void *memory;
  int64_t kind, number, offset;
} Place;

typedef struct {
  void *primitive;
  int64_t num_arguments;
  void *arguments;
  int64_t num_places;
  const Place *places;
} Task;

typedef struct {
  int64_t num_tasks;
  const Task *tasks;
} Phase;

typedef struct {
  int64_t arena_bytes, num_phases;
  const Phase *phases;
} Sequence;

typedef struct {
  int (*execute)(void *primitive, void *stream, int num_arguments, void *arguments);
  int (*set_address)(void *memory, void *address);
  void (*set_num_threads)(int);
  int (*get_max_threads)(void);
  const Sequence *(*prepare)(const char *text, size_t length, char *message, size_t message_bytes);
  void **streams; /* one for each thread that runs tasks; those in use are taken from the end */
  int64_t num_threads;
} Functions;

typedef struct Prepared {
  struct Prepared *next;
  const Sequence *sequence;
  size_t length;
  char text[];
} Prepared;

typedef struct {
  XLA_FFI_CallFrame *frame;
  char *arena;
  const Phase *phase;
  int64_t next, running;
  int status;
} Work;

enum { BUCKETS = 1024 };

static Functions functions;
static Prepared *prepared[BUCKETS];
static char *arena;
static int64_t arena_bytes = -1;
static char refusal[MESSAGE_BYTES];
/* Guards `prepared`. It is held while Python is called, so whoever holds Python's lock must not wait for it, as a fork
   would: `before_fork` leaves it alone. */
static pthread_mutex_t preparing = PTHREAD_MUTEX_INITIALIZER;
/* Guards all below; `refusal` is guarded by both. */
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
/* Signalled when the last task of a phase has ended; and for those who wait, at each phase and when no operation runs. */
static pthread_cond_t is_done = PTHREAD_COND_INITIALIZER, has_changed = PTHREAD_COND_INITIALIZER;
/* Whether an operation runs: operations share memory objects, the arena and the processor. */
static int is_running;
static Work work;
static void **free_streams;
static int64_t num_free;

static char *address_of(const Place *place, const Work *job) {
  switch (place->kind) {
    case OPERAND:
      return (char *)((XLA_FFI_Buffer *)job->frame->args.args[place->number])->data + place->offset;
    case RESULT:
      return (char *)((XLA_FFI_Buffer *)job->frame->rets.rets[place->number])->data + place->offset;
    default:
      return job->arena + place->offset;
  }
}

static int run_task(const Task *task, const Work *job, void *stream) {
  for (int64_t i = 0; i < task->num_places; ++i) {
    int status = functions.set_address(task->places[i].memory, address_of(&task->places[i], job));
    if (status) return status;
  }
  return functions.execute(task->primitive, stream, (int)task->num_arguments, task->arguments);
}

/* Run tasks of the current phase until none is left. `guard` is held before and after. */
static void take_tasks(void) {
  if (!num_free) return;
  void *stream = free_streams[--num_free];
  while (work.phase && work.next < work.phase->num_tasks) {
    const Task *task = &work.phase->tasks[work.next++];
    ++work.running;
    pthread_mutex_unlock(&guard);
    int status = run_task(task, &work, stream);
    pthread_mutex_lock(&guard);
    if (status) work.status = status;
    if (--work.running == 0 && work.next >= work.phase->num_tasks) pthread_cond_signal(&is_done);
  }
  free_streams[num_free++] = stream;
}

/* What XLA's threads run, possibly long after the phase for which it was asked. */
static void help(void *unused) {
  (void)unused;
  int max_threads = functions.get_max_threads();
  functions.set_num_threads(1);
  pthread_mutex_lock(&guard);
  take_tasks();
  pthread_mutex_unlock(&guard);
  functions.set_num_threads(max_threads);
}

/* Let so many of XLA's threads help. */
static void ask_for_help(int64_t number, XLA_FFI_CallFrame *frame) {
  XLA_FFI_ThreadPool_Schedule_Args arguments = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                                NULL};
  for (int64_t i = 0; i < number; ++i) {
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&arguments);
    if (!error) continue;
    XLA_FFI_Error_Destroy_Args destroyed = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    frame->api->XLA_FFI_Error_Destroy(&destroyed);
    return;
  }
}

static int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

/* Run the phases one after the other. `guard` is held before and after. */
static int run_sequence(const Sequence *sequence, XLA_FFI_CallFrame *frame) {
  if (sequence->arena_bytes > arena_bytes) {
    free(arena);
    arena = NULL, arena_bytes = -1;
    int64_t room = (sequence->arena_bytes / ALIGNED + 1) * ALIGNED;
    arena = aligned_alloc(ALIGNED, (size_t)room);
    if (!arena) return 1; /* dnnl_out_of_memory */
    arena_bytes = sequence->arena_bytes;
  }
  work.frame = frame, work.arena = arena, work.status = 0;
  for (int64_t i = 0; i < sequence->num_phases && !work.status; ++i) {
    work.phase = &sequence->phases[i], work.next = 0;
    int64_t helpers = smaller(work.phase->num_tasks, functions.num_threads) - 1;
    if (helpers > 0) {
      pthread_cond_broadcast(&has_changed);
      pthread_mutex_unlock(&guard);
      ask_for_help(helpers, frame);
      pthread_mutex_lock(&guard);
    }
    take_tasks();
    while (work.running) pthread_cond_wait(&is_done, &guard);
  }
  work.phase = NULL;
  return work.status;
}

static const Sequence *find(const char *text, size_t length, char *message) {
  uint64_t hash = 1469598103934665603u; /* FNV-1a */
  for (size_t i = 0; i < length; ++i) hash = (hash ^ (unsigned char)text[i]) * 1099511628211u;
  Prepared **bucket = &prepared[hash % BUCKETS];
  for (Prepared *each = *bucket; each; each = each->next)
    if (each->length == length && !memcmp(each->text, text, length)) return each->sequence;
  const Sequence *sequence = functions.prepare(text, length, message, MESSAGE_BYTES);
  Prepared *entry = sequence ? malloc(sizeof(Prepared) + length) : NULL;
  if (!entry) return sequence;
  entry->next = *bucket, entry->sequence = sequence, entry->length = length;
  memcpy(entry->text, text, length);
  *bucket = entry;
  return sequence;
}

/* Wait until no operation runs, and meanwhile run tasks of the one that does. `guard` is held before and after. */
static void wait_for_turn(int helps) {
  while (is_running) {
    if (helps) take_tasks();
    if (is_running) pthread_cond_wait(&has_changed, &guard);
  }
}

/* Run a sequence when no other one runs; if operations are refused, write why. */
static int run_alone(const Sequence *sequence, XLA_FFI_CallFrame *frame, char *message) {
  int max_threads = functions.get_max_threads();
  functions.set_num_threads(1);
  pthread_mutex_lock(&guard);
  wait_for_turn(1);
  is_running = 1;
  memcpy(message, refusal, MESSAGE_BYTES);
  int status = *refusal ? 1 : run_sequence(sequence, frame);
  is_running = 0;
  pthread_cond_broadcast(&has_changed);
  pthread_mutex_unlock(&guard);
  functions.set_num_threads(max_threads);
  return status;
}

static XLA_FFI_Error *fail(const XLA_FFI_Api *api, const char *message) {
  XLA_FFI_Error_Create_Args arguments = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message,
                                         XLA_FFI_Error_Code_INTERNAL};
  return api->XLA_FFI_Error_Create(&arguments);
}

/* The handler: see XLA_FFI_Handler in xla/ffi/api/c_api.h. */
XLA_FFI_Error *loopfeed_handle(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_InternalExtension *extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    return NULL;
  }
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  const XLA_FFI_ByteSpan *text = frame->attrs.attrs[0];
  char message[MESSAGE_BYTES] = "";
  pthread_mutex_lock(&preparing);
  memcpy(message, refusal, MESSAGE_BYTES);
  const Sequence *sequence = *refusal ? NULL : find(text->ptr, text->len, message);
  pthread_mutex_unlock(&preparing);
  if (!sequence) return fail(frame->api, message);
  int status = run_alone(sequence, frame, message);
  if (status && !*message)
    snprintf(message, MESSAGE_BYTES, "oneDNN failed to run a primitive (status %d, dnnl_status_t)", status);
  return status ? fail(frame->api, message) : NULL;
}

static void before_fork(void) {
  pthread_mutex_lock(&guard);
  wait_for_turn(0);
}

static void after_fork(void) { pthread_mutex_unlock(&guard); }

/* The child has none of the threads. */
static void in_child(void) {
  pthread_mutex_init(&preparing, NULL);
  pthread_cond_init(&is_done, NULL);
  pthread_cond_init(&has_changed, NULL);
  after_fork();
}

/* Set what the handler calls; once per process, before the handler is registered. */
void loopfeed_set_up(const Functions *given) {
  functions = *given;
  free_streams = functions.streams, num_free = functions.num_threads;
  pthread_atfork(before_fork, after_fork, in_child);
}

/* Wait until the operation that is prepared or runs has ended, and fail all later ones with this reason. */
void loopfeed_refuse(const char *reason) {
  pthread_mutex_lock(&preparing);
  pthread_mutex_lock(&guard);
  wait_for_turn(0);
  strncpy(refusal, reason, MESSAGE_BYTES - 1);
  pthread_mutex_unlock(&guard);
  pthread_mutex_unlock(&preparing);
}
