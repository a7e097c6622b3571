/// TensorFerry for C, and for the bindings of other languages: an agent that makes and serves calls, and groups.
///
///     tferry_agent* agent;
///     const char* options[] = {"name", "sim", "rendezvous", "tcp://trainer:29500"};
///     tferry_error* error = tferry_agent_join(options, 2, NULL, 0, &agent);
///
/// The library libtensorferry_c.so needs neither torch nor Python, and shows no symbols but these. It calls no function
/// of the program: calls of peers, and the ends of futures, come as events that threads of the program take
/// (tferry_agent_next). So a binding needs no callbacks from foreign threads.
///
/// Errors: a function that can fail returns NULL, or an error that the caller frees. Outputs are set only on NULL.
/// Threads: handles may be used from any thread at once, except that one thread takes a future's result, and that a
/// handle is freed when no other thread uses it. Texts are UTF-8; those that functions take may be freed on return.
/// A forked child must not use its parent's handles.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TFERRY_API __attribute__((visibility("default")))

/// The version of this interface. A change that a compiled program would notice raises it.
enum { TFERRY_ABI = 1 };
/// Returns TFERRY_ABI of the library, and its release: "0.1.0".
TFERRY_API int32_t tferry_abi(void);
TFERRY_API const char* tferry_version(void);

// ---- errors

/// An error. The pointers live until tferry_error_free.
typedef struct tferry_error {
  int32_t code;           // a number of error_codes.h
  const char* name;       // of that error's class: "DeadlineExceeded"
  const char* text;       // what happened, to which peer, and what to do
  const char* type_name;  // of code 11, an exception of the called function: "builtins.ValueError"; else ""
  const char* message;    // of code 11: the exception's own text; else ""
  const char* traceback;  // of code 11: as Python prints it, or ""
  const char* peer;       // of code 11: the agent that raised it; else ""
} tferry_error;
/// Frees an error; NULL: does nothing.
TFERRY_API void tferry_error_free(tferry_error* error);
/// Returns the number of the error with that name; 0: there is none.
TFERRY_API int32_t tferry_error_code(const char* name);

// ---- values

/// The kinds of values. docs/codec.md says how they travel.
typedef enum tferry_kind {
  TFERRY_NONE = 0,
  TFERRY_BOOL = 1,         // `integer` is 0 or 1
  TFERRY_INTEGER = 2,      // `integer`
  TFERRY_BIG_INTEGER = 3,  // beyond 64 bits: `count` bytes of magnitude at `data`, little-endian; `flags` 1: negative
  TFERRY_REAL = 4,         // `real`
  TFERRY_COMPLEX = 5,      // `real`, `imaginary`
  TFERRY_TEXT = 6,         // `count` bytes at `data`; lone surrogates as Python's surrogatepass writes them
  TFERRY_BYTES = 7,        // `count` bytes at `data`
  TFERRY_BYTEARRAY = 8,    // the same
  TFERRY_TUPLE = 9,        // `count` values follow
  TFERRY_LIST = 10,        // the same
  TFERRY_DICT = 11,        // `count` times a key and its value follow
  TFERRY_SET = 12,         // `count` values follow
  TFERRY_FROZENSET = 13,   // the same
  TFERRY_ARRAY = 14,       // elements at `data`, of the DType `dtype`, in `dimensions` dimensions; `shape`
} tferry_kind;

/// One value. Values form an array in the order in which they are written: a container stands before its values, which
/// may be containers again, up to 200 deep. All pointers are the writer's.
typedef struct tferry_value {
  uint8_t kind;        // a tferry_kind
  uint8_t flags;       // see the kinds; else 0
  uint8_t dtype;       // of an array: a number of dtype.h
  uint8_t dimensions;  // of an array: 0 to 64
  uint32_t reserved;   // 0
  union {
    int64_t integer;
    double real;
    uint64_t count;
  };
  union {
    double imaginary;
    void* data;
  };
  const int64_t* shape;  // of an array: the size of each dimension, then its stride in elements, none negative
} tferry_value;

/// Values that a peer has sent.
typedef struct tferry_message tferry_message;
/// Returns the values, whose memory lives as long as the message. What arrives:
///
/// - tensors and numpy arrays as arrays, in host memory of this process;
/// - a named tuple as a tuple; a dataclass or TensorDict as a dict by the names of its fields;
/// - torch.Size as a tuple, torch.dtype and torch.device as their texts.
///
/// Objects that Python pickled, references and sparse tensors do not fit: the call fails with InvalidArgument. A value
/// that the message holds twice comes twice.
TFERRY_API const tferry_value* tferry_message_values(const tferry_message* message, size_t* count);
TFERRY_API void tferry_message_free(tferry_message* message);

// ---- agents

/// A member of a job: AgentOptions and Agent of agent.h have the details.
typedef struct tferry_agent tferry_agent;

/// Joins a job. `options` are `count` names and values, in turn; the names are those of AgentOptions:
///
/// - texts: name, rendezvous, key, channels, interface, ports, tls, socket_dir;
/// - integers: rank, world_size, threads, max_queued_calls, max_queued_bytes, max_bytes_in_flight;
/// - seconds, such as "2.5": timeout, join_timeout, heartbeat, peer_timeout;
/// - "true" or "false": unix_sockets, shared_memory.
///
/// `served` names the functions that peers find from the start: see tferry_agent_serve. Blocks as Agent::join does, and
/// fails with its errors, and InvalidArgument: an unknown option, or TLS without OpenSSL 3 on this machine
/// (libssl.so.3).
TFERRY_API tferry_error* tferry_agent_join(const char* const* options, size_t count, const char* const* served,
                                           size_t served_count, tferry_agent** agent);
/// The agent's name lives as long as the agent. Rank -1: none.
TFERRY_API const char* tferry_agent_name(const tferry_agent* agent);
TFERRY_API int32_t tferry_agent_rank(const tferry_agent* agent);
/// Agent::explain for `bytes` bytes of host memory, and Agent::link_state. The caller frees the text by
/// tferry_text_free.
TFERRY_API tferry_error* tferry_agent_explain(const tferry_agent* agent, const char* peer, uint64_t bytes, char** text);
TFERRY_API tferry_error* tferry_agent_link_state(const tferry_agent* agent, const char* peer, char** text);
TFERRY_API void tferry_text_free(char* text);
/// Agent::shutdown; 0: no time-out. Blocks. The agent has left even if this fails.
TFERRY_API tferry_error* tferry_agent_shutdown(tferry_agent* agent, int64_t timeout_ms);
/// Agent::leave: fails what is in flight, and ends the events. Idempotent.
TFERRY_API void tferry_agent_leave(tferry_agent* agent);
/// Leaves, and frees the handle. Futures and messages of the agent may be freed later.
TFERRY_API void tferry_agent_free(tferry_agent* agent);

// ---- calls

/// Options of one call: CallOptions of agent.h.
typedef struct tferry_call_options {
  int64_t timeout_ms;   // 0: none; negative: the agent's
  const char* require;  // NULL: any channel
  uint32_t order;
  uint8_t wait_for_ready;
  uint8_t idempotent;
  uint16_t reserved;
} tferry_call_options;

/// What a call takes along. Except the elements of arrays, everything is read before the function returns.
typedef struct tferry_arguments {
  const tferry_value* values;   // the positional arguments, then those by keyword
  size_t count;                 // of `values`, those inside containers too
  size_t positional;            // how many arguments are positional
  const char* const* keywords;  // the names of the others
  size_t keyword_count;
  uint64_t memory;  // not 0: a number of the program's for the arrays' memory, see tferry_agent_released
} tferry_arguments;

/// A result that comes later: of a call, or of an operation of a group.
typedef struct tferry_future tferry_future;

/// Calls `function` at `peer`: a name that the peer serves, or "py:module:function". The future gives one value.
TFERRY_API tferry_error* tferry_agent_call(tferry_agent* agent, const tferry_call_options* options, const char* peer,
                                           const char* function, const tferry_arguments* arguments,
                                           tferry_future** future);
/// Waits for up to so long; negative: without a limit. Returns 1 if the future has completed, else 0. The thread that
/// waits reads the reply itself, which is the fastest way.
TFERRY_API int32_t tferry_future_wait(tferry_future* future, int64_t timeout_ms);
/// Asks for one event TFERRY_COMPLETED with `token` when the future has completed. Once; do not wait any more then.
TFERRY_API void tferry_future_notify(tferry_future* future, uint64_t token);
/// Cancels a call: it completes with Cancelled. No effect on a group's operation.
TFERRY_API void tferry_future_cancel(tferry_future* future);
/// Gives the result of a completed future, or its error; once. The message of a group's operation is empty, except that
/// of TFERRY_RECEIVE, which has the sender's rank.
TFERRY_API tferry_error* tferry_future_take(tferry_future* future, tferry_message** message);
/// Drops the future; a call in flight goes on.
TFERRY_API void tferry_future_free(tferry_future* future);

// ---- events and served calls

/// A call of a peer, to be answered once.
typedef struct tferry_call tferry_call;

typedef enum tferry_event_kind {
  TFERRY_NOTHING = 0,    // the time-out passed, or tferry_agent_released has something to take
  TFERRY_COMPLETED = 1,  // the future of `token` has completed
  TFERRY_CALLED = 2,     // a peer calls; `call` is the receiver's
  TFERRY_LEFT = 3,       // the agent has left: no event comes any more, on any thread
} tferry_event_kind;
typedef struct tferry_event {
  uint32_t kind;
  uint32_t reserved;
  uint64_t token;
  tferry_call* call;
} tferry_event;

/// Waits for up to so long for the next event (negative: without a limit). Each event goes to one of the threads that
/// wait. A program with served functions has as many threads here as functions shall run at once.
TFERRY_API void tferry_agent_next(tferry_agent* agent, int64_t timeout_ms, tferry_event* event);
/// Makes calls of `function` come as events. Fails as Agent::serve. At most max_queued_calls, with max_queued_bytes,
/// are unanswered at once; further ones fail at their callers with ResourceExhausted.
TFERRY_API tferry_error* tferry_agent_serve(tferry_agent* agent, const char* function);
/// Takes up to `most` numbers of memory (tferry_arguments::memory, ...) that the library no longer reads. If it still
/// reads others then, the next one that it no longer reads wakes a thread of tferry_agent_next with TFERRY_NOTHING: a
/// program that asks after each call and after each event gets every number without polling.
TFERRY_API size_t tferry_agent_released(tferry_agent* agent, uint64_t* numbers, size_t most);

/// The texts and the arguments live until the call is answered.
TFERRY_API const char* tferry_call_function(const tferry_call* call);
TFERRY_API const char* tferry_call_peer(const tferry_call* call);
TFERRY_API int32_t tferry_call_rank(const tferry_call* call);
/// Returns whether nobody waits for the answer any more, and the time until the deadline; -1: it has none.
TFERRY_API int32_t tferry_call_cancelled(const tferry_call* call);
TFERRY_API int64_t tferry_call_left_ms(const tferry_call* call);
/// Moves the arguments to the caller: positional ones, then those of the keywords, whose names live as long as the
/// call.
TFERRY_API tferry_message* tferry_call_arguments(tferry_call* call, size_t* positional, const char* const** keywords,
                                                 size_t* keyword_count);
/// Answers with one value, and frees the call. Fails with InvalidArgument if the value cannot be sent; the call is not
/// answered then. `memory` as in tferry_arguments.
TFERRY_API tferry_error* tferry_call_answer(tferry_call* call, const tferry_value* values, size_t count,
                                            uint64_t memory);
/// Answers with an error, and frees the call. Code 11 is an exception: `type_name` is "module.Class", `traceback` may
/// be
/// "". Other codes take the text alone.
TFERRY_API void tferry_call_fail(tferry_call* call, int32_t code, const char* type_name, const char* text,
                                 const char* traceback);

// ---- groups

/// An ordered list of agents that reduce and exchange arrays: Group of group.h has the contract.
typedef struct tferry_group tferry_group;

/// Group::form. Options, as of tferry_agent_join: label, algorithms, host; timeout in seconds; board, memory.
TFERRY_API tferry_error* tferry_group_form(tferry_agent* agent, const char* const* names, size_t name_count,
                                           const char* const* options, size_t count, tferry_group** group);
TFERRY_API size_t tferry_group_rank(const tferry_group* group);
TFERRY_API size_t tferry_group_size(const tferry_group* group);

/// Operations, with the inputs and outputs that each takes. All are arrays of the caller's.
typedef enum tferry_operation {
  TFERRY_BARRIER = 0,         // no arrays
  TFERRY_BROADCAST = 1,       // 1 input, which is the output of all but the root
  TFERRY_ALL_REDUCE = 2,      // 1 input, 1 output, which may be the same
  TFERRY_REDUCE = 3,          // the same; the output is used at the root
  TFERRY_ALL_GATHER = 4,      // 1 input, an output for each rank
  TFERRY_GATHER = 5,          // the same; outputs at the root alone
  TFERRY_SCATTER = 6,         // an input for each rank, at the root alone; 1 output
  TFERRY_REDUCE_SCATTER = 7,  // an input for each rank, 1 output
  TFERRY_ALL_TO_ALL = 8,      // an input and an output for each rank
  TFERRY_SEND = 9,            // 1 input, to rank `root`
  TFERRY_RECEIVE = 10,        // 1 output, from rank `root`; from any rank if `root` is UINT64_MAX
} tferry_operation;

typedef struct tferry_group_options {
  uint64_t root;       // or the other rank
  uint64_t tag;        // of send and receive
  double factor;       // of Reduction::premultiplied_sum
  int64_t timeout_ms;  // 0: the group's
  uint64_t memory;     // as in tferry_arguments, for inputs and outputs
  int32_t reduction;   // a number of Reduction (reduction.h), not custom
  int32_t reserved;
} tferry_group_options;

TFERRY_API tferry_error* tferry_group_start(tferry_group* group, int32_t operation, const tferry_group_options* options,
                                            const tferry_value* inputs, size_t input_count, const tferry_value* outputs,
                                            size_t output_count, tferry_future** future);
/// Fails the group at every rank with Cancelled.
TFERRY_API void tferry_group_abort(tferry_group* group, const char* why);
/// Leaves the group, and frees the handle.
TFERRY_API void tferry_group_free(tferry_group* group);

// ---- the store of a job that has none

/// A StoreServer of store.h: where agents with the rendezvous "store://host:port" meet.
typedef struct tferry_store tferry_store;
/// `port` 0: any. `key` and `tls` as in tferry_agent_join; "": of the environment.
TFERRY_API tferry_error* tferry_store_serve(const char* host, uint16_t port, const char* key, const char* tls,
                                            tferry_store** store);
TFERRY_API uint16_t tferry_store_port(const tferry_store* store);
TFERRY_API void tferry_store_free(tferry_store* store);

#ifdef __cplusplus
}
#endif
