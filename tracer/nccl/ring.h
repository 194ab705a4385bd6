/* The ring file of one process, as the plugin writes it and `analyzer/nccl/ring_file.py` reads it.
 *
 * A header, the names, the communicators, and `capacity` records. Event n, counted from 1, has the
 * record (n - 1) % capacity. All times are of CLOCK_MONOTONIC, in nanoseconds, unless they are a
 * GPU's. */
#ifndef DDLTRACE_NCCL_RING_H
#define DDLTRACE_NCCL_RING_H

#include <stdatomic.h>
#include <stdint.h>

#define RING_MAGIC "DDLNCCL\n"
enum { RING_VERSION = 1, NUM_NAMES = 256, NAME_BYTES = 28, NUM_COMMS = 1024, COMM_NAME_BYTES = 72 };

/* The top bit of a value that is set later: until then the value is this bit and the event's
 * number. A late write, which finds another number, is left out. */
#define PENDING (UINT64_C(1) << 63)

enum flag { IS_SEND = 1, GRAPH_CAPTURED = 2, IS_SYMMETRIC = 4, OTHER_PROCESS = 8, SYNC = 16 };

struct ring_header {
  char magic[8];
  uint32_t version;
  uint32_t record_bytes;
  uint32_t capacity;
  int32_t rank;  /* of the job; -1 if unknown */
  int32_t pid;
  uint32_t records_at; /* offset of the first record */
  uint64_t opened_ns;
  uint64_t opened_unix_ns;
  char host[64];
  char boot_id[40];
  /* Written while the job runs. */
  _Atomic uint32_t control;   /* the kinds to record, as a mask: anyone may change it */
  _Atomic uint32_t open_comms;
  _Atomic uint64_t claimed;   /* events that were given a number */
  _Atomic uint64_t lost;      /* events that found their record in use by another thread */
  _Atomic uint64_t unmatched; /* stops and states whose event is unknown or was overwritten */
  _Atomic uint64_t unknown;   /* events of a kind that the plugin does not know */
  _Atomic uint64_t lost_comms;
  _Atomic uint64_t lost_names;
};

struct ring_name {
  _Atomic uint32_t state; /* 0: free, 1: being written, 2: complete */
  char text[NAME_BYTES];
};

struct ring_comm {
  _Atomic uint64_t id;
  uint64_t opened_ns;
  _Atomic uint64_t closed_ns; /* 0: open */
  _Atomic int32_t rank;       /* in the communicator; -1 if unknown, as `ranks` and `nodes` */
  int32_t ranks;
  int32_t nodes;
  uint32_t interface;         /* version */
  char name[COMM_NAME_BYTES];
};

struct ring_record {
  _Atomic uint64_t stamp; /* twice the event's number, and 1 while it is being written */
  uint64_t start_ns;
  _Atomic uint64_t stop_ns;
  uint64_t parent; /* number of the parent event, in the ring of process `pid` if that is set */
  uint64_t group;  /* number of the group event */
  _Atomic uint64_t state_ns[3];
  _Atomic uint64_t value;  /* bytes of a step or (v3) operation; the GPU's timer at the stop */
  uint64_t sequence;       /* number of the collective; the GPU's timer at the start */
  uint64_t count;          /* elements; bytes of a chunk, of a batch, of a network request */
  uint64_t send_buffer;
  uint64_t recv_buffer;
  uint64_t stream;
  uint64_t user_tag;
  int32_t peer;   /* or root, or queue pair */
  int32_t steps;  /* of an operation; a step's number; depth, operations, ranks, phase */
  int32_t pid;    /* of a proxy operation: the process that launched it */
  int32_t device; /* network device or socket */
  uint16_t comm;
  uint8_t kind;
  uint8_t channel; /* or number of channels of a message */
  uint8_t func, datatype, algo, proto, variant; /* names */
  uint8_t warps;
  uint8_t flags;
  uint8_t spare[5];
};

_Static_assert(sizeof(struct ring_header) == 208, "layout");
_Static_assert(sizeof(struct ring_name) == 32, "layout");
_Static_assert(sizeof(struct ring_comm) == 112, "layout");
_Static_assert(sizeof(struct ring_record) == 152, "layout");

enum {
  NAMES_AT = 4096,
  COMMS_AT = NAMES_AT + NUM_NAMES * sizeof(struct ring_name),
  RECORDS_AT = COMMS_AT + NUM_COMMS * sizeof(struct ring_comm)
};

#endif
