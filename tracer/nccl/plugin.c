/* NCCL's profiler plugin: writes the events of NCCL into a ring in a memory-mapped file.
 *
 * NCCL loads this library into the training process and calls it from the job's threads and from
 * its own. So the hot path (`start`, `stop`, `record_state`) takes no lock, allocates nothing and
 * makes no system call but the reading of the clock. A handle is the event's number, not an
 * address, and a context is an index: no call can make the plugin follow a pointer into freed
 * memory or into another process, from which NCCL passes parents and contexts of proxy operations.
 * If anything is wrong, the plugin records nothing; every function returns success.
 *
 * The library is linked with `-z nodelete`: NCCL unloads it with its last communicator and loads
 * it again with the next one, and the ring continues. */
#include "interface.h"
#include "ring.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define BIT(kind) (UINT32_C(1) << (kind))
#define RELAXED memory_order_relaxed

enum { DEFAULT_RECORDS = 1 << 18, LEAST_RECORDS = 16, MOST_RECORDS = 1 << 26 };

static const char* const kind_names[NUM_KINDS] = {
    "group", "coll", "p2p", "proxy_op", "proxy_step", "proxy_ctrl", "kernel_ch", "net_plugin",
    "group_api", "coll_api", "p2p_api", "kernel_launch", "ce_coll", "ce_sync", "ce_batch",
    "kernel_phase"};

/* The process's ring, NULL if nothing is recorded. */
static _Atomic(struct ring_header*) the_ring;
static char ring_folder[3072];

static struct ring_name* names_of(struct ring_header* ring) {
  return (struct ring_name*)((char*)ring + NAMES_AT);
}
static struct ring_comm* comms_of(struct ring_header* ring) {
  return (struct ring_comm*)((char*)ring + COMMS_AT);
}
static struct ring_record* place_of_event(struct ring_header* ring, uint64_t number) {
  return (struct ring_record*)((char*)ring + RECORDS_AT) + (number - 1) % ring->capacity;
}

/* Of the communicators; the first entry stands for all that have none of their own. */
static struct {
  _Atomic(int*) mask;       /* NCCL's, while the communicator is open */
  _Atomic uint32_t applied; /* the value of `control` that it was made of */
} contexts[NUM_COMMS];
static uint32_t num_contexts;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER; /* for `open_comm` and `finalize` */

static uint64_t now_ns(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return (uint64_t)time.tv_sec * UINT64_C(1000000000) + (uint64_t)time.tv_nsec;
}

/* --- which kinds are recorded ------------------------------------------------------------- */

/* Kinds that NCCL creates as parents of others, which make these worth recording. */
static uint32_t with_parents(uint32_t mask) {
  if (mask & BIT(NET_PLUGIN)) mask |= BIT(PROXY_STEP);
  if (mask & BIT(PROXY_STEP)) mask |= BIT(PROXY_OP);
  if (mask & BIT(KERNEL_PHASE)) mask |= BIT(KERNEL_CH);
  if (mask & (BIT(PROXY_OP) | BIT(KERNEL_CH))) mask |= BIT(COLL) | BIT(P2P);
  if (mask & (BIT(CE_SYNC) | BIT(CE_BATCH))) mask |= BIT(CE_COLL);
  if (mask & (BIT(COLL) | BIT(P2P))) mask |= BIT(GROUP);
  if (mask & (BIT(COLL) | BIT(CE_COLL))) mask |= BIT(COLL_API);
  if (mask & BIT(P2P)) mask |= BIT(P2P_API);
  if (mask & (BIT(COLL_API) | BIT(P2P_API) | BIT(KERNEL_LAUNCH))) mask |= BIT(GROUP_API);
  return mask;
}

/* Tells NCCL which events to make. Never none: `control` is looked at when an event begins. */
static void set_mask(int* mask, uint32_t control) {
  int wanted = (int)(control | BIT(GROUP));
  if (__atomic_load_n(mask, __ATOMIC_RELAXED) != wanted)
    __atomic_store_n(mask, wanted, __ATOMIC_RELAXED);
}

static void apply(uint32_t index, uint32_t control) {
  atomic_store_explicit(&contexts[index].applied, control, RELAXED);
  int* mask = atomic_load_explicit(&contexts[index].mask, RELAXED);
  if (mask != NULL) set_mask(mask, control);
}

/* The kinds that an event can have in a version, without those that cost the job much. Kernel
 * channels do from NCCL 2.31 on, the first with version 7 (github.com/NVIDIA/nccl/issues/2355). */
static uint32_t default_mask(uint32_t interface) {
  uint32_t mask = BIT(NUM_KINDS) - 1;
  mask &= ~(BIT(PROXY_CTRL) | BIT(KERNEL_PHASE));
  return interface >= 7 ? mask & ~BIT(KERNEL_CH) : mask;
}

/* The kinds that DDLTRACE_NCCL_EVENTS names, divided by commas, or gives as a mask. */
static uint32_t wanted_mask(uint32_t interface) {
  const char* text = getenv("DDLTRACE_NCCL_EVENTS");
  if (text == NULL || *text == '\0') return default_mask(interface);
  char* end;
  unsigned long number = strtoul(text, &end, 0);
  if (*end == '\0') return (uint32_t)number & (BIT(NUM_KINDS) - 1);
  uint32_t mask = 0;
  while (*text != '\0') {
    size_t length = strcspn(text, ",");
    for (int kind = 0; kind < NUM_KINDS; kind++)
      if (strlen(kind_names[kind]) == length && strncmp(text, kind_names[kind], length) == 0)
        mask |= BIT(kind);
    if (length == 7 && strncmp(text, "default", 7) == 0) mask |= default_mask(interface);
    text += length + (text[length] == ',');
  }
  return mask;
}

/* --- the file ------------------------------------------------------------------------------ */

static int number_in(const char* variable) {
  const char* text = getenv(variable);
  if (text == NULL || *text == '\0') return -1;
  char* end;
  errno = 0;
  long number = strtol(text, &end, 10);
  return *end == '\0' && errno == 0 && number >= 0 && number < INT32_MAX ? (int)number : -1;
}

/* The rank in the job, from the variables of torchrun, Open MPI, MPICH and Slurm. */
static int rank_of_job(int rank_in_comm) {
  static const char* const variables[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
                                          "SLURM_PROCID"};
  for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
    int rank = number_in(variables[i]);
    if (rank >= 0) return rank;
  }
  return rank_in_comm;
}

/* A new file in `folder`; another name if an earlier process of this id left one. */
static int create_file(const char* folder, int rank, char* path, size_t size) {
  char who[16] = "unknown";
  if (rank >= 0) snprintf(who, sizeof who, "%d", rank);
  for (int attempt = 0; attempt < 100; attempt++) {
    char again[16] = "";
    if (attempt) snprintf(again, sizeof again, "-%d", attempt);
    int length = snprintf(path, size, "%s/nccl-%s-%d%s.ring", folder, who, (int)getpid(), again);
    if (length < 0 || (size_t)length >= size) return -1;
    int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file >= 0 || errno != EEXIST) return file;
  }
  return -1;
}

/* Allocates all blocks: a page of a mapped file for which there is no block kills the process. */
static int allocate(int file, size_t bytes) {
  struct rlimit limit; /* beyond it, the kernel sends a signal */
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur < bytes) return -1;
  return posix_fallocate(file, 0, (off_t)bytes) == 0 ? 0 : -1;
}

static void read_boot_id(char* text, size_t size) {
  int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  ssize_t length = read(file, text, size - 1);
  close(file);
  for (ssize_t i = 0; i < length; i++)
    if (text[i] == '\n') text[i] = '\0';
}

/* Opens the ring of this process. Returns what prevents it; NULL if nothing does. */
static const char* open_ring(const char* folder, uint32_t interface, int rank_in_comm) {
  if (*folder == '\0') return "DDLTRACE_NCCL_DIR is not set";
  int wanted = number_in("DDLTRACE_NCCL_RECORDS");
  if (wanted < 0) wanted = DEFAULT_RECORDS;
  if (wanted < LEAST_RECORDS) wanted = LEAST_RECORDS;
  if (wanted > MOST_RECORDS) wanted = MOST_RECORDS;
  int rank = rank_of_job(rank_in_comm);
  char path[4096];
  int file = create_file(folder, rank, path, sizeof path);
  if (file < 0) return "no file can be created in DDLTRACE_NCCL_DIR";
  size_t bytes = RECORDS_AT + (size_t)wanted * sizeof(struct ring_record);
  struct ring_header* ring = MAP_FAILED;
  if (allocate(file, bytes) == 0)
    ring = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (ring == MAP_FAILED) {
    unlink(path);
    return "there is no room in DDLTRACE_NCCL_DIR";
  }
  ring->version = RING_VERSION;
  ring->record_bytes = sizeof(struct ring_record);
  ring->capacity = (uint32_t)wanted;
  ring->rank = rank;
  ring->pid = getpid();
  ring->records_at = RECORDS_AT;
  ring->opened_ns = now_ns(CLOCK_MONOTONIC);
  ring->opened_unix_ns = now_ns(CLOCK_REALTIME);
  gethostname(ring->host, sizeof ring->host - 1);
  read_boot_id(ring->boot_id, sizeof ring->boot_id);
  atomic_store_explicit(&ring->control, wanted_mask(interface), RELAXED);
  num_contexts = 1;
  snprintf(ring_folder, sizeof ring_folder, "%s", folder);
  memcpy(ring->magic, RING_MAGIC, sizeof ring->magic); /* last: the header is complete */
  atomic_store_explicit(&the_ring, ring, memory_order_release);
  return NULL;
}

/* A forked child shares the pages of the ring: it must not write into its parent's. */
static void forget_in_child(void) {
  atomic_store_explicit(&the_ring, NULL, RELAXED);
  pthread_mutex_init(&opening, NULL);
  for (uint32_t i = 0; i < NUM_COMMS; i++) atomic_store_explicit(&contexts[i].mask, NULL, RELAXED);
}

__attribute__((constructor)) static void loaded(void) {
  pthread_atfork(NULL, NULL, forget_in_child);
}

/* --- communicators -------------------------------------------------------------------------- */

static int open_comm(void** context, int* mask, uint32_t interface, uint64_t id, const char* name,
                     int nodes, int ranks, int rank, logger log) {
  if (context != NULL) *context = NULL;
  if (mask == NULL) return SUCCESS;
  pthread_mutex_lock(&opening);
  const char* why = NULL;
  const char* folder = getenv("DDLTRACE_NCCL_DIR");
  if (folder == NULL || strlen(folder) >= sizeof ring_folder) folder = "";
  struct ring_header* ring = atomic_load_explicit(&the_ring, RELAXED);
  /* Without communicators, the process may record elsewhere from now on. The old ring stays
   * mapped, because calls for its events can still come. */
  int is_old = ring != NULL && atomic_load_explicit(&ring->open_comms, RELAXED) == 0 &&
               strcmp(folder, ring_folder) != 0;
  if (ring == NULL || is_old) {
    if (is_old) atomic_store_explicit(&the_ring, NULL, RELAXED);
    why = open_ring(folder, interface, rank);
    ring = atomic_load_explicit(&the_ring, RELAXED);
  }
  if (ring != NULL && context != NULL) {
    uint32_t index = 0;
    if (num_contexts < NUM_COMMS) {
      index = num_contexts++;
      struct ring_comm* comm = &comms_of(ring)[index];
      comm->opened_ns = now_ns(CLOCK_MONOTONIC);
      atomic_store_explicit(&comm->rank, rank, RELAXED);
      comm->ranks = ranks;
      comm->nodes = nodes;
      if (name != NULL) strncpy(comm->name, name, COMM_NAME_BYTES - 1);
      atomic_store_explicit(&comm->id, id, RELAXED);
      comm->interface = interface; /* last: the entry is complete */
      atomic_store_explicit(&contexts[index].mask, mask, RELAXED);
      atomic_fetch_add_explicit(&ring->open_comms, 1, RELAXED);
    } else {
      atomic_fetch_add_explicit(&ring->lost_comms, 1, RELAXED);
    }
    *context = (void*)(uintptr_t)(index + 1);
    uint32_t control = atomic_load_explicit(&ring->control, RELAXED);
    set_mask(mask, control);
    atomic_store_explicit(&contexts[index].applied, control, RELAXED);
  } else {
    __atomic_store_n(mask, 0, __ATOMIC_RELAXED);
  }
  pthread_mutex_unlock(&opening);
  if (why != NULL && log != NULL)
    log(LOG_INFO, LOG_INIT, "ddltrace", 0, "ddltrace: NCCL's events are not recorded: %s", why);
  return SUCCESS;
}

static uint32_t index_of(const void* context) {
  uintptr_t number = (uintptr_t)context;
  return number >= 1 && number <= NUM_COMMS ? (uint32_t)(number - 1) : 0;
}

static int finalize(void* context) {
  uint32_t index = index_of(context);
  pthread_mutex_lock(&opening);
  struct ring_header* ring = atomic_load_explicit(&the_ring, RELAXED);
  if (ring != NULL && index != 0 && index < num_contexts &&
      atomic_load_explicit(&comms_of(ring)[index].closed_ns, RELAXED) == 0) {
    atomic_store_explicit(&comms_of(ring)[index].closed_ns, now_ns(CLOCK_MONOTONIC), RELAXED);
    atomic_store_explicit(&contexts[index].mask, NULL, RELAXED);
    atomic_fetch_sub_explicit(&ring->open_comms, 1, RELAXED);
  }
  pthread_mutex_unlock(&opening);
  return SUCCESS;
}

/* --- names ----------------------------------------------------------------------------------- */

/* The place of a name in the file, 0 for none. NCCL passes string literals, so the last place of
 * an address is nearly always right; the text is compared anyway. */
static uint8_t name_of(struct ring_header* ring, const char* text) {
  static _Atomic uint8_t last[256];
  if (text == NULL) return 0;
  struct ring_name* names = names_of(ring);
  uintptr_t address = (uintptr_t)text;
  _Atomic uint8_t* hint = &last[(address ^ (address >> 8)) & 255];
  uint8_t place = atomic_load_explicit(hint, RELAXED);
  if (place != 0 && atomic_load_explicit(&names[place].state, memory_order_acquire) == 2 &&
      strncmp(names[place].text, text, NAME_BYTES - 1) == 0)
    return place;
  for (uint32_t i = 1; i < NUM_NAMES; i++) {
    uint32_t state = atomic_load_explicit(&names[i].state, memory_order_acquire);
    if (state == 0 && atomic_compare_exchange_strong_explicit(&names[i].state, &state, 1,
                                                              memory_order_acq_rel, RELAXED)) {
      size_t length = strnlen(text, NAME_BYTES - 1);
      memcpy(names[i].text, text, length);
      atomic_store_explicit(&names[i].state, 2, memory_order_release);
      state = 2;
    }
    /* An entry that another thread is writing is passed over: a name may be there twice. */
    if (state == 2 && strncmp(names[i].text, text, NAME_BYTES - 1) == 0) {
      atomic_store_explicit(hint, (uint8_t)i, RELAXED);
      return (uint8_t)i;
    }
  }
  atomic_fetch_add_explicit(&ring->lost_names, 1, RELAXED);
  return 0;
}

/* --- events: the hot path ------------------------------------------------------------------ */

/* The kind of a new event if it is recorded; -1 if not. */
static int recorded_kind(struct ring_header* ring, void* context, uint64_t type) {
  uint32_t control = atomic_load_explicit(&ring->control, RELAXED);
  uint32_t index = index_of(context);
  if (atomic_load_explicit(&contexts[index].applied, RELAXED) != control) apply(index, control);
  if (type == 0 || (type & (type - 1)) != 0 || type >= BIT(NUM_KINDS)) {
    atomic_fetch_add_explicit(&ring->unknown, 1, RELAXED);
    return -1;
  }
  return with_parents(control) & type ? __builtin_ctzll(type) : -1;
}

/* Takes the next record for this thread alone; NULL if another thread is still writing it. */
static struct ring_record* claim(struct ring_header* ring, uint64_t* number) {
  *number = atomic_fetch_add_explicit(&ring->claimed, 1, RELAXED) + 1;
  struct ring_record* record = place_of_event(ring, *number);
  uint64_t stamp = atomic_load_explicit(&record->stamp, RELAXED);
  if ((stamp & 1) != 0 || stamp >= 2 * *number ||
      !atomic_compare_exchange_strong_explicit(&record->stamp, &stamp, 2 * *number | 1,
                                               memory_order_acquire, RELAXED)) {
    atomic_fetch_add_explicit(&ring->lost, 1, RELAXED);
    return NULL;
  }
  uint64_t pending = PENDING | *number;
  atomic_store_explicit(&record->stop_ns, pending, RELAXED);
  atomic_store_explicit(&record->value, pending, RELAXED);
  for (int i = 0; i < 3; i++) atomic_store_explicit(&record->state_ns[i], pending, RELAXED);
  return record;
}

/* Everything about an event that is known when it begins; filled by the functions below. */
static void publish(struct ring_record* record, const struct ring_record* made, void** handle,
                    uint64_t number) {
  record->parent = made->parent;
  record->group = made->group;
  record->sequence = made->sequence;
  record->count = made->count;
  record->send_buffer = made->send_buffer;
  record->recv_buffer = made->recv_buffer;
  record->stream = made->stream;
  record->user_tag = made->user_tag;
  record->peer = made->peer;
  record->steps = made->steps;
  record->pid = made->pid;
  record->device = made->device;
  memcpy(&record->comm, &made->comm, sizeof *made - offsetof(struct ring_record, comm));
  record->start_ns = now_ns(CLOCK_MONOTONIC);
  atomic_store_explicit(&record->stamp, 2 * number, memory_order_release);
  *handle = (void*)(uintptr_t)number;
}

static void describe_proxy_op(const struct ring_header* ring, struct ring_record* made,
                              const struct proxy_op* op) {
  made->pid = op->pid;
  made->channel = op->channel;
  made->peer = op->peer;
  made->steps = op->steps;
  made->count = op->chunk_bytes > 0 ? (uint64_t)op->chunk_bytes : 0;
  made->flags |= op->is_send ? IS_SEND : 0;
  if (op->pid != ring->pid) { /* launched by another process (PXN), whose contexts are its own */
    made->flags |= OTHER_PROCESS;
    made->comm = 0;
  }
}

static void describe_net(struct ring_record* made, const struct net_plugin* event) {
  made->sequence = (uint64_t)event->id;
  if (event->data == NULL) return;
  if (event->id == NET_IB_V1) {
    const struct net_ib_v1* ib = event->data;
    made->device = ib->device;
    made->peer = ib->queue;
    made->count = ib->bytes;
  } else if (event->id == NET_SOCKET_V1) {
    const struct net_socket_v1* socket = event->data;
    made->device = socket->fd;
    made->count = socket->bytes;
  }
}

/* What version 3 has in common with the later ones: other structures, fields of the same names. */
#define DESCRIBE_COLL(ring, made, from)                                                   \
  do {                                                                                    \
    (made)->sequence = (from).sequence;                                                   \
    (made)->func = name_of(ring, (from).func);                                            \
    (made)->send_buffer = (uintptr_t)(from).send_buffer;                                  \
    (made)->recv_buffer = (uintptr_t)(from).recv_buffer;                                  \
    (made)->count = (from).count;                                                         \
    (made)->peer = (from).root;                                                           \
    (made)->datatype = name_of(ring, (from).datatype);                                    \
    (made)->channel = (from).channels;                                                    \
    (made)->warps = (from).warps;                                                         \
    (made)->algo = name_of(ring, (from).algo);                                            \
    (made)->proto = name_of(ring, (from).proto);                                          \
  } while (0)
#define DESCRIBE_P2P(ring, made, from)                                                    \
  do {                                                                                    \
    (made)->func = name_of(ring, (from).func);                                            \
    (made)->send_buffer = (uintptr_t)(from).buffer;                                       \
    (made)->datatype = name_of(ring, (from).datatype);                                    \
    (made)->count = (from).count;                                                         \
    (made)->peer = (from).peer;                                                           \
  } while (0)

static void describe_v3(struct ring_header* ring, struct ring_record* made,
                        const struct description_v3* event) {
  const char* comm_name = NULL;
  uint64_t id = 0;
  switch (made->kind) {
    case COLL:
      comm_name = event->coll.comm_name;
      id = event->coll.comm_hash;
      DESCRIBE_COLL(ring, made, event->coll);
      break;
    case P2P:
      comm_name = event->p2p.comm_name;
      id = event->p2p.comm_hash;
      DESCRIBE_P2P(ring, made, event->p2p);
      break;
    case PROXY_OP: describe_proxy_op(ring, made, &event->proxy_op); break;
    case PROXY_STEP: made->steps = event->proxy_step.step; break;
    case KERNEL_CH: made->channel = event->kernel_ch.channel; break;
    case NET_PLUGIN: describe_net(made, &event->net_plugin); break;
    default: break;
  }
  uint64_t unset = 0;
  if (id != 0 && made->comm != 0 &&
      atomic_compare_exchange_strong_explicit(&comms_of(ring)[made->comm].id, &unset, id, RELAXED,
                                              RELAXED)) {
    /* The first message of a communicator: `init` was told nothing about it. */
    struct ring_comm* comm = &comms_of(ring)[made->comm];
    atomic_store_explicit(&comm->rank, event->rank, RELAXED);
    if (comm_name != NULL) strncpy(comm->name, comm_name, COMM_NAME_BYTES - 1);
  }
}

static void describe(struct ring_header* ring, struct ring_record* made,
                     const struct description* event, int interface) {
  switch (made->kind) {
    case GROUP_API:
      made->flags = event->group_api.graph_captured ? GRAPH_CAPTURED : 0;
      made->steps = event->group_api.depth;
      break;
    case COLL_API:
      made->func = name_of(ring, event->coll_api.func);
      made->count = event->coll_api.count;
      made->datatype = name_of(ring, event->coll_api.datatype);
      made->peer = event->coll_api.root;
      made->stream = (uintptr_t)event->coll_api.stream;
      made->flags = event->coll_api.graph_captured ? GRAPH_CAPTURED : 0;
      if (interface >= 7) made->user_tag = event->coll_api.user_tag;
      break;
    case P2P_API:
      made->func = name_of(ring, event->p2p_api.func);
      made->count = event->p2p_api.count;
      made->datatype = name_of(ring, event->p2p_api.datatype);
      made->stream = (uintptr_t)event->p2p_api.stream;
      made->flags = event->p2p_api.graph_captured ? GRAPH_CAPTURED : 0;
      if (interface >= 7) made->user_tag = event->p2p_api.user_tag;
      break;
    case KERNEL_LAUNCH: made->stream = (uintptr_t)event->kernel_launch.stream; break;
    case COLL:
      DESCRIBE_COLL(ring, made, event->coll);
      if (interface >= 5) made->group = (uintptr_t)event->coll.group;
      if (interface >= 7) {
        made->variant = name_of(ring, event->coll.variant);
        made->flags = event->coll.is_symmetric ? IS_SYMMETRIC : 0;
        made->user_tag = event->coll.user_tag;
      }
      break;
    case P2P:
      DESCRIBE_P2P(ring, made, event->p2p);
      made->channel = event->p2p.channels;
      if (interface >= 5) made->group = (uintptr_t)event->p2p.group;
      if (interface >= 7) made->user_tag = event->p2p.user_tag;
      break;
    case PROXY_OP: describe_proxy_op(ring, made, &event->proxy_op); break;
    case PROXY_STEP: made->steps = event->proxy_step.step; break;
    case KERNEL_CH:
      made->channel = event->kernel_ch.channel;
      made->sequence = event->kernel_ch.timer;
      break;
    case NET_PLUGIN: describe_net(made, &event->net_plugin); break;
    case CE_COLL:
      made->sequence = event->ce_coll.sequence;
      made->func = name_of(ring, event->ce_coll.func);
      made->send_buffer = (uintptr_t)event->ce_coll.send_buffer;
      made->recv_buffer = (uintptr_t)event->ce_coll.recv_buffer;
      made->count = event->ce_coll.count;
      made->peer = event->ce_coll.root;
      made->datatype = name_of(ring, event->ce_coll.datatype);
      made->variant = name_of(ring, event->ce_coll.sync_strategy);
      made->steps = (int32_t)event->ce_coll.batches;
      made->stream = (uintptr_t)event->ce_coll.stream;
      made->flags = event->ce_coll.intra_batch_sync ? SYNC : 0;
      if (interface >= 7) made->user_tag = event->ce_coll.user_tag;
      break;
    case CE_SYNC:
      made->flags = event->ce_sync.is_complete ? SYNC : 0;
      made->steps = event->ce_sync.ranks;
      break;
    case CE_BATCH:
      made->steps = event->ce_batch.ops;
      made->count = event->ce_batch.bytes;
      made->flags = event->ce_batch.uses_intra_sync ? SYNC : 0;
      break;
    case KERNEL_PHASE:
      made->channel = event->kernel_phase.channel;
      made->steps = event->kernel_phase.phase;
      made->variant = name_of(ring, event->kernel_phase.name);
      made->sequence = event->kernel_phase.timer;
      break;
    default: break;
  }
}

static int start(void* context, void** handle, const void* event, int interface) {
  if (handle == NULL) return SUCCESS;
  *handle = NULL;
  struct ring_header* ring = atomic_load_explicit(&the_ring, memory_order_acquire);
  if (ring == NULL || event == NULL) return SUCCESS;
  const struct description_v3* first = event; /* in version 3 */
  const struct description* later = event;
  uint64_t type = interface == 3 ? first->type : interface == 4 ? later->type_v4 : later->type;
  int kind = recorded_kind(ring, context, type);
  if (kind < 0) return SUCCESS;
  struct ring_record made = {
      .kind = (uint8_t)kind, .comm = (uint16_t)index_of(context), .device = -1,
      .parent = interface == 3 ? (uintptr_t)first->parent : (uintptr_t)later->parent};
  if (interface == 3)
    describe_v3(ring, &made, first);
  else
    describe(ring, &made, later, interface);
  uint64_t number;
  struct ring_record* record = claim(ring, &number);
  if (record != NULL) publish(record, &made, handle, number);
  return SUCCESS;
}

static int start_v3(void* context, void** handle, struct description_v3* event) {
  return start(context, handle, event, 3);
}
static int start_v4(void* context, void** handle, struct description* event) {
  return start(context, handle, event, 4);
}
static int start_v5(void* context, void** handle, struct description* event) {
  return start(context, handle, event, 5);
}
static int start_v6(void* context, void** handle, struct description* event) {
  return start(context, handle, event, 6);
}
static int start_v7(void* context, void** handle, struct description* event) {
  return start(context, handle, event, 7);
}

/* The record that an event still has, by its handle; NULL if there is none. */
static struct ring_record* record_of(struct ring_header* ring, const void* handle) {
  uint64_t number = (uintptr_t)handle;
  uint64_t claimed = atomic_load_explicit(&ring->claimed, RELAXED);
  if (number != 0 && number <= claimed && claimed - number < ring->capacity)
    return place_of_event(ring, number);
  atomic_fetch_add_explicit(&ring->unmatched, 1, RELAXED);
  return NULL;
}

/* Sets a value that the event does not have yet. */
static int set_once(_Atomic uint64_t* value, const void* handle, uint64_t set) {
  uint64_t pending = PENDING | (uintptr_t)handle;
  return atomic_compare_exchange_strong_explicit(value, &pending, set & ~PENDING, RELAXED, RELAXED);
}

/* Sets the value of an event that may have one already. If its record is taken for another event
 * meanwhile, the value is that event's pending one, so the exchange fails. */
static void set_value(struct ring_record* record, const void* handle, uint64_t set) {
  uint64_t number = (uintptr_t)handle;
  uint64_t old = atomic_load_explicit(&record->value, RELAXED);
  if (old != (PENDING | number) &&
      ((old & PENDING) != 0 ||
       atomic_load_explicit(&record->stamp, memory_order_acquire) != 2 * number))
    return;
  atomic_compare_exchange_strong_explicit(&record->value, &old, set & ~PENDING, RELAXED, RELAXED);
}

static int stop(void* handle) {
  struct ring_header* ring = atomic_load_explicit(&the_ring, memory_order_acquire);
  if (ring == NULL || handle == NULL) return SUCCESS;
  struct ring_record* record = record_of(ring, handle);
  if (record != NULL && !set_once(&record->stop_ns, handle, now_ns(CLOCK_MONOTONIC)))
    atomic_fetch_add_explicit(&ring->unmatched, 1, RELAXED);
  return SUCCESS;
}

/* Where the time of a state is kept: the wait for the GPU, for the peer or a flush, for the net. */
static int place_of(int state) {
  switch (state) {
    case SEND_GPU_WAIT: case RECV_GPU_WAIT: case OP_IN_PROGRESS: case GROUP_START_STOP: return 0;
    case SEND_PEER_WAIT: case RECV_FLUSH_WAIT: case GROUP_END_START: return 1;
    case SEND_WAIT: case RECV_WAIT: return 2;
    default: return -1;
  }
}

static int record_state(void* handle, int state, union state_values* values) {
  struct ring_header* ring = atomic_load_explicit(&the_ring, memory_order_acquire);
  if (ring == NULL || handle == NULL) return SUCCESS;
  struct ring_record* record = record_of(ring, handle);
  if (record == NULL) return SUCCESS;
  int place = place_of(state);
  if (place >= 0) set_once(&record->state_ns[place], handle, now_ns(CLOCK_MONOTONIC));
  if (values == NULL) return SUCCESS;
  if (state == KERNEL_CH_STOP || state == KERNEL_PHASE_STOP)
    set_value(record, handle, values->timer);
  else if (state == SEND_WAIT || state == RECV_FLUSH_WAIT || state == RECV_GPU_WAIT ||
           state == SEND_DONE || state == RECV_DONE)
    set_value(record, handle, values->bytes);
  else if (state >= CTRL_FIRST && state <= CTRL_LAST)
    set_value(record, handle, (uint64_t)state << 32 | (uint32_t)values->appended);
  return SUCCESS;
}

/* --- the interface's versions -------------------------------------------------------------- */

static int open_v3(void** context, int* mask) {
  return open_comm(context, mask, 3, 0, NULL, -1, -1, -1, NULL);
}
static int open_v4(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks,
                   int rank, logger log) {
  return open_comm(context, mask, 4, id, name, nodes, ranks, rank, log);
}
static int open_v5(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks,
                   int rank, logger log) {
  return open_comm(context, mask, 5, id, name, nodes, ranks, rank, log);
}
static int open_v6(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks,
                   int rank, logger log) {
  return open_comm(context, mask, 6, id, name, nodes, ranks, rank, log);
}
static int open_v7(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks,
                   int rank, logger log) {
  return open_comm(context, mask, 7, id, name, nodes, ranks, rank, log);
}

EXPORT struct profiler_v3 ncclProfiler_v3 = {"ddltrace", open_v3, start_v3, stop, record_state,
                                             finalize};
EXPORT struct profiler_v4 ncclProfiler_v4 = {"ddltrace", open_v4, start_v4, stop, record_state,
                                             finalize};
EXPORT struct profiler_v5 ncclProfiler_v5 = {"ddltrace", open_v5, start_v5, stop, record_state,
                                             finalize};
EXPORT struct profiler_v6 ncclProfiler_v6 = {"ddltrace", open_v6, start_v6, stop, record_state,
                                             finalize};
EXPORT struct profiler_v7 ncclProfiler_v7 = {"ddltrace", open_v7, start_v7, stop, record_state,
                                             finalize};
