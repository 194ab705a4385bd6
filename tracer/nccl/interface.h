/* NCCL's profiler interface, versions 3 to 7, as far as the plugin uses it.
 *
 * Facts: src/include/plugin/profiler/profiler_v3.h to profiler_v7.h of github.com/NVIDIA/nccl.
 * From version 4 on, each version only appends: to the end of a description, or new descriptions
 * beside the others. So one structure describes events of the versions 4 to 7, and what a version
 * does not have must not be read from it. Version 3 has other descriptions of messages. The type
 * is one byte in versions 3 and 4. */
#ifndef DDLTRACE_NCCL_INTERFACE_H
#define DDLTRACE_NCCL_INTERFACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ncclResult_t, of which a profiler returns only this one: an error in `init` unloads it. */
enum { SUCCESS = 0 };

typedef void (*logger)(int level, unsigned long flags, const char* file, int line,
                       const char* format, ...);
enum { LOG_INFO = 3, LOG_INIT = 1 };

/* Bit of a kind of event in the mask and in `type`. */
enum kind {
  GROUP, COLL, P2P, PROXY_OP, PROXY_STEP, PROXY_CTRL, KERNEL_CH, NET_PLUGIN,
  GROUP_API, COLL_API, P2P_API, KERNEL_LAUNCH,     /* since version 5 */
  CE_COLL, CE_SYNC, CE_BATCH,                      /* since version 6 */
  KERNEL_PHASE,                                    /* since version 7 */
  NUM_KINDS
};

/* States of events; 0 to 7 in version 3 only. */
enum state {
  SEND_DONE = 3, RECV_DONE = 7,
  SEND_GPU_WAIT = 8, SEND_WAIT = 9, RECV_WAIT = 10, RECV_FLUSH_WAIT = 11, RECV_GPU_WAIT = 12,
  CTRL_FIRST = 13, CTRL_LAST = 18,
  OP_IN_PROGRESS = 19, SEND_PEER_WAIT = 20, NET_UPDATE = 21,
  KERNEL_CH_STOP = 22, GROUP_START_STOP = 23, GROUP_END_START = 24, KERNEL_PHASE_STOP = 31
};

struct proxy_op { int pid; uint8_t channel; int peer; int steps; int chunk_bytes; int is_send; };
struct net_plugin { int64_t id; void* data; };

struct description_v3 {
  uint8_t type;
  void* parent;
  int rank;
  union {
    struct {
      const char* comm_name; uint64_t comm_hash; uint64_t sequence; const char* func;
      const void* send_buffer; void* recv_buffer; size_t count; int root; const char* datatype;
      uint8_t channels; uint8_t warps; const char* algo; const char* proto;
    } coll;
    struct {
      const char* comm_name; uint64_t comm_hash; const char* func; void* buffer;
      const char* datatype; size_t count; int peer;
    } p2p;
    struct proxy_op proxy_op;
    struct { int step; } proxy_step;
    struct { uint8_t channel; } kernel_ch;
    struct net_plugin net_plugin;
  };
};

struct description {
  union { uint8_t type_v4; uint64_t type; };
  void* parent;
  int rank; /* not set on API and kernel events */
  union {
    struct { bool graph_captured; int depth; } group_api;
    struct {
      const char* func; size_t count; const char* datatype; int root; void* stream;
      bool graph_captured;
      uint64_t user_tag; /* since 7 */
    } coll_api;
    struct {
      const char* func; size_t count; const char* datatype; void* stream; bool graph_captured;
      uint64_t user_tag; /* since 7 */
    } p2p_api;
    struct { void* stream; } kernel_launch;
    struct {
      uint64_t sequence; const char* func; const void* send_buffer; void* recv_buffer;
      size_t count; int root; const char* datatype; uint8_t channels; uint8_t warps;
      const char* algo; const char* proto;
      void* group; /* since 5 */
      const char* variant; bool is_symmetric; uint64_t user_tag; /* since 7 */
    } coll;
    struct {
      const char* func; void* buffer; const char* datatype; size_t count; int peer;
      uint8_t channels;
      void* group;       /* since 5 */
      uint64_t user_tag; /* since 7 */
    } p2p;
    struct proxy_op proxy_op;
    struct { int step; } proxy_step;
    struct { uint8_t channel; uint64_t timer; } kernel_ch;
    struct net_plugin net_plugin;
    struct {
      uint64_t sequence; const char* func; const void* send_buffer; void* recv_buffer;
      size_t count; int root; const char* datatype; const char* sync_strategy;
      bool intra_batch_sync; uint32_t batch_size; uint32_t batches; uint32_t ce_sequence;
      void* stream;
      uint64_t user_tag; /* since 7 */
    } ce_coll;
    struct { bool is_complete; int ranks; } ce_sync;
    struct { int ops; size_t bytes; bool uses_intra_sync; } ce_batch;
    struct { uint8_t channel; uint8_t phase; const char* name; uint64_t timer; } kernel_phase;
  };
};

/* What comes with a state. In version 3 the bytes of a proxy operation, later those of a step. */
union state_values {
  size_t bytes;
  int appended;
  void* net_data;
  uint64_t timer;
};

/* What NCCL's own network plugins describe, in version 1 of their descriptions. */
enum { NET_IB_V1 = (1 << 16) | 1, NET_SOCKET_V1 = (2 << 16) | 1 };
struct net_ib_v1 { uint8_t type; int device; uint64_t wr_id; int opcode; int queue; size_t bytes; };
struct net_socket_v1 { uint8_t type; int fd; int op; size_t bytes; };

typedef int (*init_v3)(void** context, int* mask);
typedef int (*init_v4)(void** context, int* mask, const char* comm_name, uint64_t comm_hash,
                       int nodes, int ranks, int rank, logger log);
typedef int (*init_v5)(void** context, uint64_t comm_id, int* mask, const char* comm_name,
                       int nodes, int ranks, int rank, logger log);

#define PROFILER(version, init_type, description_type)                                     \
  struct profiler_v##version {                                                             \
    const char* name;                                                                      \
    init_type init;                                                                        \
    int (*start)(void* context, void** handle, description_type* event);                   \
    int (*stop)(void* handle);                                                             \
    int (*record_state)(void* handle, int state, union state_values* values);              \
    int (*finalize)(void* context);                                                        \
  }

PROFILER(3, init_v3, struct description_v3);
PROFILER(4, init_v4, struct description);
PROFILER(5, init_v5, struct description);
PROFILER(6, init_v5, struct description);
PROFILER(7, init_v5, struct description);

#endif
