//! Sums as expressions instead of numbers.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use drumline_schedule::step::Rank;
use drumline_schedule::tree::Node;
use drumline_schedule::{SumOrder, Topology};

/// Calls that run back to back. The second may fail because of what the first left behind, and the third
/// because of what the second made of it.
pub(super) const CALLS: usize = 3;

/// An expression. Equal expressions have equal ids.
///
/// The first ids are the leaves: the elements that each rank contributes to each call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Id(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Expression {
    /// The left and the right operand. Expressions keep order and parentheses.
    Sum(Id, Id),
    Finish(Id),
    /// The sum of a host that is rounded before it travels.
    Round(Id),
}

pub(super) struct Expressions {
    world_size: usize,
    /// Elements that a rank contributes.
    elements: usize,
    ids: HashMap<Expression, Id, BuildHasherDefault<Mix>>,
    /// The expressions other than leaves, in the order of their ids.
    composed: Vec<Expression>,
    /// For each id as a left operand, the right operand and the sum of its last sum. In the canonical tree
    /// there is only one, so few sums need a look-up.
    last_sum: Vec<Option<(Id, Id)>>,
}

impl Expressions {
    pub(super) fn new(world_size: usize, elements: usize) -> Expressions {
        Expressions {
            world_size,
            elements,
            ids: HashMap::default(),
            composed: vec![],
            last_sum: vec![],
        }
    }

    // Memory ends long before 2^32 ids do.
    pub(super) fn leaf(&self, call: usize, rank: Rank, element: usize) -> Id {
        Id(((call * self.world_size + rank) * self.elements + element) as u32)
    }

    fn leaves(&self) -> usize {
        CALLS * self.world_size * self.elements
    }

    /// Whether `id` is an unfinished sum.
    pub(super) fn is_sum(&self, id: Id) -> bool {
        let composed = (id.0 as usize).checked_sub(self.leaves());
        composed.is_some_and(|index| matches!(self.composed[index], Expression::Sum(..)))
    }

    pub(super) fn sum(&mut self, left: Id, right: Id) -> Id {
        let index = left.0 as usize;
        if let Some(&Some((last, sum))) = self.last_sum.get(index)
            && last == right
        {
            return sum;
        }
        let sum = self.id(Expression::Sum(left, right));
        if self.last_sum.len() <= index {
            self.last_sum.resize(index + 1, None);
        }
        self.last_sum[index] = Some((right, sum));
        sum
    }

    pub(super) fn finish(&mut self, value: Id) -> Id {
        self.id(Expression::Finish(value))
    }

    /// A sum that is not finished, rounded.
    pub(super) fn round(&mut self, sum: Id) -> Id {
        self.id(Expression::Round(sum))
    }

    /// The sum of all ranks in the order of the topology. `rounds`: hosts round the sums of their ranks.
    pub(super) fn wanted(
        &mut self,
        topology: &Topology,
        rounds: bool,
        call: usize,
        element: usize,
    ) -> Id {
        let leaves = |expressions: &Expressions, ranks: &[Rank]| -> Vec<Id> {
            ranks.iter().map(|&rank| expressions.leaf(call, rank, element)).collect()
        };
        let values: Vec<Id> = match topology.order {
            _ if rounds => {
                let hosts = topology.ranks_by_host().iter();
                let mut of_host = |ranks: &Vec<Rank>| {
                    let sum = self.tree(&leaves(self, ranks));
                    if ranks.len() > 1 { self.round(sum) } else { sum }
                };
                hosts.map(&mut of_host).collect()
            }
            SumOrder::Rank | SumOrder::Backend => {
                leaves(self, &(0..topology.world_size).collect::<Vec<_>>())
            }
            SumOrder::Placement => {
                let hosts = topology.ranks_by_host().iter();
                hosts.map(|ranks| self.tree(&leaves(self, ranks))).collect()
            }
        };
        self.tree(&values)
    }

    /// The canonical sum.
    fn tree(&mut self, values: &[Id]) -> Id {
        fn sum(expressions: &mut Expressions, values: &[Id], node: Node) -> Id {
            match node.children() {
                None => values[node.lo],
                Some((left, right)) => {
                    let left = sum(expressions, values, left);
                    let right = sum(expressions, values, right);
                    expressions.sum(left, right)
                }
            }
        }
        sum(self, values, Node::root(values.len()))
    }

    fn id(&mut self, expression: Expression) -> Id {
        let next = Id((self.leaves() + self.composed.len()) as u32);
        *self.ids.entry(expression).or_insert_with(|| {
            self.composed.push(expression);
            next
        })
    }

    /// The text of an expression, such as `(r0[7] + r1[7])`. A long text is cut, because a wrong schedule may
    /// add sums of sums.
    pub(super) fn text(&self, id: Id, call: usize) -> String {
        const LONG: usize = 500;
        let mut text = String::new();
        self.write(id, call, LONG, &mut text);
        if text.len() > LONG {
            text.push_str(" ...");
        }
        text
    }

    fn write(&self, id: Id, call: usize, long: usize, text: &mut String) {
        if text.len() > long {
            return;
        }
        let id = id.0 as usize;
        let Some(composed) = id.checked_sub(self.leaves()) else {
            let (rank, element) = (id / self.elements % self.world_size, id % self.elements);
            text.push_str(&format!("r{rank}[{element}]"));
            let of = id / self.elements / self.world_size;
            if of != call {
                text.push_str(&format!(" of call {of}"));
            }
            return;
        };
        match self.composed[composed] {
            Expression::Sum(left, right) => {
                text.push('(');
                self.write(left, call, long, text);
                text.push_str(" + ");
                self.write(right, call, long, text);
                text.push(')');
            }
            Expression::Round(value) => {
                text.push_str("round(");
                self.write(value, call, long, text);
                text.push(')');
            }
            Expression::Finish(value) => {
                text.push_str("finish(");
                self.write(value, call, long, text);
                text.push(')');
            }
        }
    }
}

/// Hashes pairs of ids. A check spends most of its time on look-ups, and the standard hash is slow for such
/// short keys. No attacker chooses the ids.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(u32::from(byte)));
    }

    fn write_u32(&mut self, word: u32) {
        // An odd number without a pattern: 2^64 divided by the golden ratio.
        self.0 = (self.0 ^ u64::from(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }

    fn write_isize(&mut self, discriminant: isize) {
        self.write_u32(discriminant as u32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
