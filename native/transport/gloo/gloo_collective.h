// gloo's broadcast and barrier as work that progresses as connections allow. Used by one thread.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/gloo/gloo_mesh.h"

namespace refit::gloo {

// The ranks of a group; `mine` are those of this process.
struct Members {
  int size = 0;
  std::vector<int> mine;
};

class Collective {
 public:
  virtual ~Collective() = default;
  // Starts everything that can start; returns true when all is done. Throws LinkFault.
  virtual bool step() = 0;
  // Describes what it waits for, for messages. With `link`, only what it waits for on that link (empty: nothing).
  virtual std::string where(const Link* link) const = 0;
};

// One block of memory to broadcast.
struct Piece {
  uint8_t* memory = nullptr;
  uint64_t bytes = 0;
};

// Broadcasts one after another, each of one piece, along a binomial tree from `root`. `tag` counts them.
//
// Several ranks of this process may receive the same piece: the one nearest to the root keeps the bytes, and the others
// drop theirs. Pieces are requested ahead, so that a sender does not wait for us between two of them.
class Broadcasts : public Collective {
 public:
  Broadcasts(Mesh& mesh, const Members& members, int root, std::vector<Piece> pieces, uint32_t& tag);
  bool step() override;
  std::string where(const Link* link) const override;

 private:
  struct Edge {
    Link* link = nullptr;
    bool receives = false;
    bool sends = false;
  };
  // A pending piece; its transfers are those of `edges_`. Pairs hold pointers to them.
  struct Running {
    size_t piece = 0;
    uint64_t slot = 0;
    std::vector<Transfer> transfers;
    bool sending = false;
  };

  void open(size_t piece);
  bool advance(Running& running);

  const std::vector<Piece> pieces_;
  std::vector<Edge> edges_;
  int keeper_ = -1;          // the edge whose bytes are kept; -1: the root is in this process
  std::vector<Link*> idle_;  // links without a part in these broadcasts
  uint32_t& tag_;
  size_t next_ = 0;
  std::deque<std::unique_ptr<Running>> running_;
};

// A message of torch's send from a rank elsewhere to a rank of this process.
struct Message {
  int mine = 0;
  int other = 0;
  uint32_t tag = 0;
  Piece into;
};

// Messages that arrive in any order.
class Messages : public Collective {
 public:
  Messages(Mesh& mesh, std::vector<Message> messages);
  bool step() override;
  std::string where(const Link* link) const override;

 private:
  struct Arriving {
    Message message;
    Link* link = nullptr;
    Transfer transfer;
  };

  // Pairs hold pointers to the transfers: a deque does not move them.
  std::deque<Arriving> arriving_;
  bool is_open_ = false;
};

// A dissemination barrier (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988): in the
// round of distance d = 1, 2, 4, ... each rank sends to the rank d after it and receives from the rank d before it.
class Barrier : public Collective {
 public:
  Barrier(Mesh& mesh, const Members& members, uint32_t& tag);
  bool step() override;
  std::string where(const Link* link) const override;

 private:
  struct Way {
    Link* link = nullptr;
    Transfer receive, send;
    bool receives = false, sends = false;
  };
  struct Place {
    int rank = 0;
    int distance = 1;       // of its current round
    bool notified = false;  // in the current round, the next rank
  };

  bool advance(Place& place);
  Way* way(int mine, int other);

  const Members& members_;
  uint64_t slot_ = 0;
  std::deque<Way> ways_;
  std::vector<Place> places_;
};

}  // namespace refit::gloo
