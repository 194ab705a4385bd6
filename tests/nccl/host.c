/* Loads a profiler plugin as NCCL does, and drives it: host PLUGIN VERSION SCENARIO [NUMBER].
 *
 * Scenarios print nothing and exit with 0 unless the plugin did what none may: returned an error,
 * or wrote where NCCL does not expect it. What was recorded is checked by the tests. `cost` prints
 * one line per kind of event: its name and nanoseconds per event. */
#include "../../tracer/nccl/interface.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Places in NCCL's own structures, from its headers, compiled on x86-64. */
_Static_assert(sizeof(struct description_v3) == 120, "version 3");
_Static_assert(offsetof(struct description_v3, coll.proto) == 112, "version 3");
_Static_assert(offsetof(struct description, rank) == 16, "versions 4 to 7");
_Static_assert(offsetof(struct description, coll.proto) == 96, "versions 4 to 7");
_Static_assert(offsetof(struct description, coll.group) == 104, "versions 5 to 7");
_Static_assert(offsetof(struct description, coll.user_tag) == 128, "version 7");
_Static_assert(offsetof(struct description, ce_coll.stream) == 104, "versions 6 and 7");
_Static_assert(sizeof(struct description) == 136, "version 7");

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
      exit(2);                                                            \
    }                                                                     \
  } while (0)

static int version;
static int mask; /* one for the process, as NCCL's */
static struct profiler_v3* v3;
static struct profiler_v4* v4;
static struct profiler_v5* v5; /* also 6 and 7, whose structures are the same */

static void* load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) fprintf(stderr, "%s\n", dlerror());
  CHECK(library != NULL);
  char symbol[32];
  snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
  void* table = dlsym(library, symbol);
  CHECK(table != NULL);
  if (version == 3) v3 = table;
  else if (version == 4) v4 = table;
  else v5 = table;
  return library;
}

static void quiet(int level, unsigned long flags, const char* file, int line, const char* format,
                  ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
}

static void* open_comm(uint64_t id, const char* name, int nodes, int ranks, int rank) {
  void* context = NULL;
  int result = version == 3   ? v3->init(&context, &mask)
               : version == 4 ? v4->init(&context, &mask, name, id, nodes, ranks, rank, quiet)
                              : v5->init(&context, id, &mask, name, nodes, ranks, rank, quiet);
  CHECK(result == SUCCESS);
  return context;
}

static void* begin(void* context, struct description* event, uint64_t type) {
  void* handle = (void*)1;
  event->type = type;
  CHECK((version == 4 ? v4->start(context, &handle, event)
                      : v5->start(context, &handle, event)) == SUCCESS);
  return handle;
}
static void* begin_v3(void* context, struct description_v3* event, uint64_t type) {
  void* handle = (void*)1;
  event->type = (uint8_t)type;
  CHECK(v3->start(context, &handle, event) == SUCCESS);
  return handle;
}
static void end(void* handle) {
  int result = version == 3 ? v3->stop(handle) : version == 4 ? v4->stop(handle) : v5->stop(handle);
  CHECK(result == SUCCESS);
}
static void enter(void* handle, int state, union state_values* values) {
  int result = version == 3   ? v3->record_state(handle, state, values)
               : version == 4 ? v4->record_state(handle, state, values)
                              : v5->record_state(handle, state, values);
  CHECK(result == SUCCESS);
}
static void close_comm(void* context) {
  int result = version == 3   ? v3->finalize(context)
               : version == 4 ? v4->finalize(context)
                              : v5->finalize(context);
  CHECK(result == SUCCESS);
}

#define BIT(kind) (UINT64_C(1) << (kind))

static int is_on(enum kind kind) { return (__atomic_load_n(&mask, __ATOMIC_RELAXED) & BIT(kind)) != 0; }

/* --- the events of one collective, as NCCL makes them ---------------------------------------- */

struct shape { uint64_t sequence; size_t count; int channels, steps; int pid; int captured; };

static void* proxy_op(void* context, void* parent, int pid, int channel, int is_send, int steps) {
  struct proxy_op op = {.pid = pid, .channel = (uint8_t)channel, .peer = 1, .steps = steps,
                        .chunk_bytes = 4096, .is_send = is_send};
  if (version == 3) {
    struct description_v3 event = {.parent = parent, .rank = 0, .proxy_op = op};
    return begin_v3(context, &event, BIT(PROXY_OP));
  }
  struct description event = {.parent = parent, .rank = 0, .proxy_op = op};
  return begin(context, &event, BIT(PROXY_OP));
}

static void proxy_step(void* context, void* op, int number, int is_send, size_t bytes) {
  void* step;
  if (version == 3) {
    struct description_v3 event = {.parent = op, .proxy_step = {number}};
    step = begin_v3(context, &event, BIT(PROXY_STEP));
  } else {
    struct description event = {.parent = op, .proxy_step = {number}};
    step = begin(context, &event, BIT(PROXY_STEP));
  }
  union state_values values = {.bytes = 0};
  enter(step, is_send ? SEND_GPU_WAIT : RECV_WAIT, &values);
  values.bytes = bytes;
  if (is_send && version >= 4) enter(step, SEND_PEER_WAIT, &values);
  enter(step, is_send ? SEND_WAIT : RECV_FLUSH_WAIT, &values);
  if (!is_send) enter(step, RECV_GPU_WAIT, &values);
  if (is_on(NET_PLUGIN)) {
    struct net_ib_v1 ib = {.type = 1, .device = 2, .queue = 77, .bytes = bytes};
    struct net_plugin net = {.id = NET_IB_V1, .data = &ib};
    void* request;
    if (version == 3) {
      struct description_v3 event = {.parent = step, .net_plugin = net};
      request = begin_v3(context, &event, BIT(NET_PLUGIN));
    } else {
      struct description event = {.parent = step, .net_plugin = net};
      request = begin(context, &event, BIT(NET_PLUGIN));
    }
    union state_values update = {.net_data = &ib};
    enter(request, NET_UPDATE, &update);
    end(request);
  }
  end(step);
}

static void kernel_channel(void* context, void* parent, int channel, uint64_t from, uint64_t to) {
  union state_values values = {.timer = to};
  if (version == 3) {
    struct description_v3 event = {.parent = parent, .kernel_ch = {(uint8_t)channel}};
    void* kernel = begin_v3(context, &event, BIT(KERNEL_CH));
    enter(kernel, KERNEL_CH_STOP, &values);
    end(kernel);
    return;
  }
  struct description event = {.parent = parent, .kernel_ch = {(uint8_t)channel, from}};
  void* kernel = begin(context, &event, BIT(KERNEL_CH));
  if (version == 7 && is_on(KERNEL_PHASE)) {
    static const char* const phases[] = {"initial_sync", "compute", "final_sync"};
    uint64_t third = (to - from) / 3;
    for (int phase = 0; phase < 3; phase++) {
      uint64_t start = from + (uint64_t)phase * third;
      struct description part = {.parent = kernel, .kernel_phase = {(uint8_t)channel,
                                 (uint8_t)phase, phases[phase], start}};
      void* handle = begin(context, &part, BIT(KERNEL_PHASE));
      union state_values stop = {.timer = phase == 2 ? to : start + third};
      enter(handle, KERNEL_PHASE_STOP, &stop);
      end(handle);
    }
  }
  enter(kernel, KERNEL_CH_STOP, &values);
  end(kernel);
}

/* API, group and collective on the host, then proxies and kernels, which end after the message's
 * own stop: that means enqueued only. */
static void all_reduce(void* context, struct shape of) {
  static char buffers[2];
  void *api = NULL, *group_api = NULL, *group, *coll;
  if (version == 3) {
    struct description_v3 event = {0};
    group = begin_v3(context, &event, BIT(GROUP));
    struct description_v3 message = {.parent = group, .rank = 0, .coll = {
        "comm three", 0xabc3, of.sequence, "AllReduce", buffers, buffers + 1, of.count, 0,
        "ncclFloat32", (uint8_t)of.channels, 16, "RING", "SIMPLE"}};
    coll = begin_v3(context, &message, BIT(COLL));
  } else {
    if (version >= 5) {
      struct description event = {.group_api = {of.captured, 1}};
      group_api = begin(context, &event, BIT(GROUP_API));
      struct description call = {.parent = group_api, .coll_api = {"AllReduce", of.count,
                                 "ncclFloat32", 0, (void*)0x5000, of.captured, 42}};
      api = begin(context, &call, BIT(COLL_API));
      end(api);
      enter(group_api, GROUP_START_STOP, NULL);
      enter(group_api, GROUP_END_START, NULL);
    }
    struct description event = {0};
    group = begin(context, &event, BIT(GROUP));
    struct description message = {.parent = version == 4 ? group : api, .rank = 0};
    message.coll.sequence = of.sequence;
    message.coll.func = "AllReduce";
    message.coll.send_buffer = buffers;
    message.coll.recv_buffer = buffers + 1;
    message.coll.count = of.count;
    message.coll.datatype = "ncclFloat32";
    message.coll.channels = (uint8_t)of.channels;
    message.coll.warps = 16;
    message.coll.algo = "RING";
    message.coll.proto = "SIMPLE";
    if (version >= 5) message.coll.group = group;
    if (version >= 7) {
      message.coll.variant = "Symk";
      message.coll.is_symmetric = true;
      message.coll.user_tag = 42;
    }
    coll = begin(context, &message, BIT(COLL));
  }
  void* launch = NULL;
  if (version >= 5) {
    struct description event = {.parent = group_api, .kernel_launch = {(void*)0x5000}};
    launch = begin(context, &event, BIT(KERNEL_LAUNCH));
    end(launch);
  }
  end(coll);
  end(group);
  if (group_api != NULL) end(group_api);
  for (int channel = 0; channel < of.channels; channel++) {
    for (int is_send = 0; is_send < 2 && of.steps > 0; is_send++) {
      void* op = proxy_op(context, coll, of.pid, channel, is_send, of.steps);
      if (version >= 4) enter(op, OP_IN_PROGRESS, NULL);
      for (int step = 0; step < of.steps; step++)
        proxy_step(context, op, step, is_send, 1000 * (size_t)(step + 1));
      union state_values values = {.bytes = 500500};
      if (version == 3) enter(op, is_send ? SEND_DONE : RECV_DONE, &values);
      end(op);
    }
    if (is_on(KERNEL_CH))
      kernel_channel(context, coll, channel, 1000000 + 100 * of.sequence + (uint64_t)channel,
                     1000300 + 100 * of.sequence + (uint64_t)channel);
  }
}

static void send_to(void* context, int peer) {
  static char buffer;
  if (version == 3) {
    struct description_v3 message = {.rank = 0, .p2p = {"comm three", 0xabc3, "Send", &buffer,
                                     "ncclInt8", 512, peer}};
    end(begin_v3(context, &message, BIT(P2P)));
    return;
  }
  struct description message = {.rank = 0, .p2p = {"Send", &buffer, "ncclInt8", 512, peer, 2, NULL, 7}};
  end(begin(context, &message, BIT(P2P)));
}

static void copy_engine(void* context) {
  struct description event = {.rank = 0};
  event.ce_coll.sequence = 3;
  event.ce_coll.func = "AllGather";
  event.ce_coll.count = 64;
  event.ce_coll.datatype = "ncclBfloat16";
  event.ce_coll.sync_strategy = "MC";
  event.ce_coll.batches = 2;
  event.ce_coll.stream = (void*)0x6000;
  void* coll = begin(context, &event, BIT(CE_COLL));
  struct description sync = {.parent = coll, .ce_sync = {true, 8}};
  end(begin(context, &sync, BIT(CE_SYNC)));
  struct description batch = {.parent = coll, .ce_batch = {4, 8192, true}};
  end(begin(context, &batch, BIT(CE_BATCH)));
  end(coll);
}

/* --- scenarios -------------------------------------------------------------------------------- */

static void run_sequence(int count) {
  void* context = open_comm(0xfeed0000 + (uint64_t)version, "default_pg", 2, 4, 3);
  for (int i = 0; i < count; i++)
    all_reduce(context, (struct shape){.sequence = (uint64_t)i, .count = 256, .channels = 2,
                                       .steps = 2, .pid = getpid(), .captured = i == 1});
  send_to(context, 2);
  if (version >= 6) copy_engine(context);
  close_comm(context);
}

static void run_hostile(int count) {
  (void)count;
  void* context = open_comm(1, NULL, 1, 2, 0);
  static char huge[100000];
  memset(huge, 'x', sizeof huge - 1);
  /* A proxy operation of another process: context and parent are its own (PXN). */
  void* op = proxy_op((void*)0xdeadbeef000, (void*)0xdeadbeef777, getpid() + 1, 5, 1, 1);
  proxy_step((void*)0xdeadbeef000, op, 0, 1, 64);
  end(op);
  /* Handles that are not from this plugin, or are used twice, or too late. */
  end(op);
  end(NULL);
  end((void*)0xffffffffffffffff);
  end((void*)12345678);
  enter((void*)0xdeadbeef, KERNEL_CH_STOP, NULL);
  enter(op, 9999, NULL);
  enter(NULL, SEND_WAIT, NULL);
  /* Kinds that do not exist, none, and several at once. */
  if (version >= 5) {
    struct description event = {0};
    CHECK(begin(context, &event, BIT(40)) == NULL);
    CHECK(begin(context, &event, 0) == NULL);
    CHECK(begin(context, &event, 3) == NULL);
    struct description named = {.coll = {.func = huge, .datatype = huge, .algo = "", .count = SIZE_MAX}};
    end(begin(context, &named, BIT(COLL)));
    CHECK(v5->start(context, NULL, &named) == SUCCESS);
    void* handle = (void*)1;
    CHECK(v5->start(context, &handle, NULL) == SUCCESS && handle == NULL);
    CHECK(v5->init(NULL, 1, NULL, NULL, 0, 0, 0, NULL) == SUCCESS);
    struct net_plugin unknown = {.id = 0x7f0001, .data = (void*)8};
    struct description net = {.net_plugin = unknown};
    end(begin(context, &net, BIT(NET_PLUGIN)));
  }
  /* More names than a ring can hold. */
  for (int i = 0; i < 300; i++) {
    char name[32];
    snprintf(name, sizeof name, "Operation%d", i);
    if (version == 3) {
      struct description_v3 event = {.coll = {.func = name}};
      end(begin_v3(context, &event, BIT(COLL)));
    } else {
      struct description event = {.coll = {.func = name}};
      end(begin(context, &event, BIT(COLL)));
    }
  }
  /* An aborted communicator: closed with events that have not ended, which end afterwards. */
  void* late = proxy_op(context, NULL, getpid(), 0, 0, 1);
  close_comm(context);
  end(late);
  close_comm(context);
  close_comm((void*)0xdeadbeef000);
  close_comm(NULL);
}

static void run_comms(int count) {
  /* A communicator, those that are split from it, and a smaller one after an error. */
  void* whole = open_comm(100, "world", 2, 4, 1);
  void** parts = calloc((size_t)count, sizeof *parts);
  static char huge[5000];
  memset(huge, 'n', sizeof huge - 1);
  for (int i = 0; i < count; i++)
    parts[i] = open_comm(200 + (uint64_t)i, i % 3 ? huge : NULL, 1, 2, i % 2);
  for (int i = 0; i < count; i++)
    all_reduce(parts[i], (struct shape){.sequence = 0, .count = 8, .channels = 1, .pid = getpid()});
  all_reduce(whole, (struct shape){.sequence = 0, .count = 8, .channels = 1, .pid = getpid()});
  close_comm(whole);
  void* shrunk = open_comm(300, "shrunk", 2, 3, 1);
  all_reduce(shrunk, (struct shape){.sequence = 0, .count = 8, .channels = 1, .pid = getpid()});
  close_comm(shrunk);
  for (int i = 0; i < count; i++) close_comm(parts[i]);
  free(parts);
}

static void* thread_comm; /* one communicator for all threads */
static int thread_count;

static void* work(void* argument) {
  int number = *(int*)argument;
  void* own = open_comm(400 + (uint64_t)number, "own", 1, 2, 0);
  for (int i = 0; i < thread_count; i++) {
    struct shape shape = {.sequence = (uint64_t)i, .count = 8, .channels = 1, .steps = 2,
                          .pid = getpid()};
    all_reduce(i % 2 ? own : thread_comm, shape);
    send_to(own, number);
  }
  close_comm(own);
  return NULL;
}

static void run_threads(int count) {
  enum { THREADS = 4 };
  pthread_t threads[THREADS];
  int numbers[THREADS];
  thread_count = count;
  thread_comm = open_comm(399, "shared", 1, 2, 0);
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[i], NULL, work, &numbers[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  close_comm(thread_comm);
}

/* A child that goes on with its parent's communicator, and then opens one of its own. */
static void run_fork(int count) {
  void* context = open_comm(500, "parent", 1, 2, 0);
  struct shape shape = {.count = 8, .channels = 1, .pid = getpid()};
  all_reduce(context, shape);
  pid_t child = fork();
  if (child == 0) {
    shape.sequence = 1;
    all_reduce(context, shape);
    if (count) {
      void* own = open_comm(501, "child", 1, 2, 0);
      shape.sequence = 2;
      shape.pid = getpid();
      all_reduce(own, shape);
      close_comm(own);
    }
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  shape.sequence = 3;
  all_reduce(context, shape);
  close_comm(context);
}

/* Unloaded with its last communicator, and loaded again. */
static void run_reload(const char* path, void* library) {
  run_sequence(1);
  CHECK(dlclose(library) == 0);
  library = load(path);
  run_sequence(2);
  dlclose(library);
}

/* The control word, which the tests write while this waits on its input. */
static void run_control(int count) {
  (void)count;
  void* context = open_comm(600, "controlled", 1, 2, 0);
  for (int line; (line = getchar()) != EOF;) {
    if (line != '\n') continue;
    struct shape shape = {.count = 8, .channels = 1, .steps = 1, .pid = getpid()};
    all_reduce(context, shape);
    printf("%d\n", mask);
    fflush(stdout);
  }
  close_comm(context);
}

/* Dies in the middle of its events. */
static void run_killed(int count) {
  void* context = open_comm(700, "killed", 1, 2, 0);
  for (int i = 0; i < count; i++)
    all_reduce(context, (struct shape){.sequence = (uint64_t)i, .count = 8, .channels = 1,
                                       .pid = getpid()});
  raise(SIGKILL);
}

/* --- cost -------------------------------------------------------------------------------------- */

enum { BATCH = 32 };

static double seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double spent[NUM_KINDS];
static long timed[NUM_KINDS];

#define TIMED(kind, calls)                   \
  do {                                       \
    double from = seconds();                 \
    for (int i = 0; i < BATCH; i++) calls;   \
    spent[kind] += seconds() - from;         \
  } while (0)

/* A batch of events of a kind, each with `state` entered before its end; -1 for none. */
#define TIMED_EVENTS(kind, event, state, values)                                          \
  do {                                                                                    \
    static void* made[BATCH];                                                             \
    TIMED(kind, (made[i] = begin(context, &(event), BIT(kind)),                           \
                 (state) < 0 ? (void)0 : enter(made[i], (state), (values))));             \
    TIMED(kind, end(made[i]));                                                            \
    timed[kind] += BATCH;                                                                 \
  } while (0)

/* Time per event, begin to end with its states: batches of messages, each with one of every kind
 * below it that the version has. */
static void run_cost(int count) {
  static void *api[BATCH], *coll[BATCH], *op[BATCH], *step[BATCH], *kernel[BATCH], *p2p[BATCH];
  static char buffer[2];
  void* context = open_comm(800, "timed", 1, 2, 0);
  union state_values values = {.timer = 2000};
  for (int round = 0; round < count; round++) {
    struct description group_event = {.group_api = {false, 1}};
    void* group_api = begin(context, &group_event, BIT(GROUP_API));
    struct description call = {.parent = group_api, .coll_api = {.func = "AllReduce",
        .count = 256, .datatype = "ncclFloat32", .stream = (void*)0x5000}};
    TIMED(COLL_API, api[i] = begin(context, &call, BIT(COLL_API)));
    TIMED(COLL_API, end(api[i]));
    struct description none = {0};
    void* group = begin(context, &none, BIT(GROUP));
    struct description message = {.rank = 0, .coll = {.func = "AllReduce",
        .send_buffer = buffer, .recv_buffer = buffer + 1, .count = 256,
        .datatype = "ncclFloat32", .channels = 1, .warps = 16, .algo = "RING",
        .proto = "SIMPLE", .group = group}};
    TIMED(COLL, (message.parent = api[i], message.coll.sequence = (uint64_t)(round * BATCH + i),
                 coll[i] = begin(context, &message, BIT(COLL))));
    TIMED(COLL, end(coll[i]));
    struct description p2p_event = {.rank = 0, .p2p = {.func = "Send", .buffer = buffer,
        .datatype = "ncclInt8", .count = 512, .peer = 1, .channels = 1, .group = group}};
    struct description p2p_call = {.parent = group_api, .p2p_api = {.func = "Send",
        .count = 512, .datatype = "ncclInt8", .stream = (void*)0x5000}};
    void* p2p_api = begin(context, &p2p_call, BIT(P2P_API));
    end(p2p_api);
    p2p_event.parent = p2p_api;
    TIMED(P2P, p2p[i] = begin(context, &p2p_event, BIT(P2P)));
    TIMED(P2P, end(p2p[i]));
    end(group);
    end(group_api);
    struct description op_event = {.rank = 0, .proxy_op = {.pid = getpid(), .peer = 1, .steps = 8,
        .chunk_bytes = 4096, .is_send = 1}};
    TIMED(PROXY_OP, (op_event.parent = coll[i], op[i] = begin(context, &op_event, BIT(PROXY_OP)),
                     enter(op[i], OP_IN_PROGRESS, NULL)));
    struct description step_event = {.rank = 0, .proxy_step = {1}};
    TIMED(PROXY_STEP, (step_event.parent = op[i],
                       step[i] = begin(context, &step_event, BIT(PROXY_STEP)),
                       enter(step[i], SEND_GPU_WAIT, &values)));
    TIMED(PROXY_STEP, (enter(step[i], SEND_PEER_WAIT, &values), enter(step[i], SEND_WAIT, &values),
                       end(step[i])));
    TIMED(PROXY_OP, end(op[i]));
    struct description kernel_event = {.rank = 0, .kernel_ch = {0, 1000}};
    for (int which = 0; which < 2; which++) { /* of the collectives and the sends */
      void** of = which ? p2p : coll;
      TIMED(KERNEL_CH, (kernel_event.parent = of[i],
                        kernel[i] = begin(context, &kernel_event, BIT(KERNEL_CH))));
      TIMED(KERNEL_CH, (enter(kernel[i], KERNEL_CH_STOP, &values), end(kernel[i])));
    }
    timed[KERNEL_CH] += 2 * BATCH;
    static const int one_each[] = {COLL_API, COLL, P2P, PROXY_OP, PROXY_STEP};
    for (int i = 0; i < 5; i++) timed[one_each[i]] += BATCH;
    TIMED_EVENTS(GROUP_API, group_event, -1, NULL);
    TIMED_EVENTS(P2P_API, p2p_call, -1, NULL);
    TIMED_EVENTS(GROUP, none, -1, NULL);
    struct description launch = {.parent = group_api, .kernel_launch = {(void*)0x5000}};
    TIMED_EVENTS(KERNEL_LAUNCH, launch, -1, NULL);
    TIMED_EVENTS(PROXY_CTRL, none, CTRL_FIRST, &values);
    struct net_ib_v1 ib = {.type = 1, .device = 2, .queue = 77, .bytes = 4096};
    struct description net = {.parent = step[0], .net_plugin = {.id = NET_IB_V1, .data = &ib}};
    union state_values update = {.net_data = &ib};
    TIMED_EVENTS(NET_PLUGIN, net, NET_UPDATE, &update);
    if (version >= 6) {
      struct description copies = {.rank = 0, .ce_coll = {.func = "AllGather", .count = 64,
          .datatype = "ncclFloat32", .sync_strategy = "MC", .batches = 2}};
      TIMED_EVENTS(CE_COLL, copies, -1, NULL);
      struct description sync = {.parent = coll[0], .ce_sync = {true, 8}};
      TIMED_EVENTS(CE_SYNC, sync, -1, NULL);
      struct description batch = {.parent = coll[0], .ce_batch = {4, 8192, true}};
      TIMED_EVENTS(CE_BATCH, batch, -1, NULL);
    }
    if (version >= 7) {
      struct description phase = {.parent = kernel[0], .kernel_phase = {0, 1, "compute", 1000}};
      TIMED_EVENTS(KERNEL_PHASE, phase, KERNEL_PHASE_STOP, &values);
    }
  }
  double from = seconds();
  for (int i = 0; i < 1000000; i++) seconds();
  printf("clock %.1f\n", 1e3 * (seconds() - from));
  static const char* const names[NUM_KINDS] = {
      "group", "coll", "p2p", "proxy_op", "proxy_step", "proxy_ctrl", "kernel_ch", "net_plugin",
      "group_api", "coll_api", "p2p_api", "kernel_launch", "ce_coll", "ce_sync", "ce_batch",
      "kernel_phase"};
  for (int kind = 0; kind < NUM_KINDS; kind++)
    if (timed[kind]) printf("%s %.1f\n", names[kind], 1e9 * spent[kind] / (double)timed[kind]);
  close_comm(context);
}

static long resident_kb(void) {
  long pages = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (file != NULL && fscanf(file, "%*d %ld", &pages) != 1) pages = 0;
  if (file != NULL) fclose(file);
  return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Prints by how many KiB the process has grown over `count` collectives, after as many that fill
 * the ring. */
static void run_soak(int count) {
  void* context = open_comm(900, "soak", 1, 2, 0);
  struct shape shape = {.count = 8, .channels = 2, .steps = 4, .pid = getpid()};
  long before = 0;
  for (int i = 0; i < 2 * count; i++) {
    if (i == count) before = resident_kb();
    shape.sequence = (uint64_t)i;
    all_reduce(context, shape);
  }
  printf("%ld\n", resident_kb() - before);
  close_comm(context);
}

int main(int argc, char** argv) {
  if (argc < 4) return 64;
  version = atoi(argv[2]);
  void* library = load(argv[1]);
  int number = argc > 4 ? atoi(argv[4]) : 2;
  const char* scenario = argv[3];
  static const struct { const char* name; void (*run)(int); } scenarios[] = {
      {"sequence", run_sequence}, {"hostile", run_hostile}, {"comms", run_comms},
      {"threads", run_threads}, {"fork", run_fork}, {"control", run_control},
      {"killed", run_killed}, {"cost", run_cost}, {"soak", run_soak}};
  for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
    if (strcmp(scenario, scenarios[i].name) == 0) return scenarios[i].run(number), 0;
  if (strcmp(scenario, "reload") == 0) return run_reload(argv[1], library), 0;
  return 64;
}
