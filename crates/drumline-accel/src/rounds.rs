//! Rounds of words on the process group, beside the calls of devices. Each ends in the inbox.

use std::sync::Arc;

use drumline_group::driving;

use crate::direct::{ASK, Agreement, Answer, WORDS, describe};
use crate::error;
use crate::inbox::Shared;

/// Compares the lengths of a call on all ranks. The host compares those of single windows: ranks whose lengths differ
/// by whole windows would go on with parts of different calls.
pub(crate) fn agree_on_length(shared: &Arc<Shared>, elements: u64) {
    let told = shared.clone();
    driving::all_gather_then(&shared.group, vec![elements], move |heard| {
        let agreed =
            heard.and_then(|all| match all.iter().position(|theirs| *theirs != elements) {
                None => Ok(()),
                Some(peer) => {
                    let (theirs, ours) =
                        (format!("{} elements", all[peer]), format!("{elements} elements"));
                    Err(error::differs("all_reduce", peer, &theirs, &ours))
                }
            });
        told.tell(|inbox| inbox.agreed.push(agreed));
    });
}

/// Compares a call on all ranks.
pub(crate) fn agree_on_call(shared: &Arc<Shared>, words: &[u64; WORDS]) -> Arc<Agreement> {
    let agreement = Arc::new(Agreement::default());
    let (told, answered, own) = (shared.clone(), agreement.clone(), *words);
    driving::all_gather_then(&shared.group, words.to_vec(), move |heard| {
        let result = heard.and_then(|all| {
            let (all, _) = all.as_chunks::<WORDS>();
            if all.contains(&ASK) {
                answered.tell(Answer::Asked);
                return Ok(());
            }
            match all.iter().enumerate().find(|(_, theirs)| **theirs != own) {
                None => {
                    answered.tell(Answer::Same);
                    Ok(())
                }
                Some((peer, theirs)) => {
                    Err(error::differs("nccl", peer, &describe(theirs), &describe(&own)))
                }
            }
        });
        told.tell(|inbox| inbox.agreed.push(result));
    });
    agreement
}

/// Asks all ranks: after a hint that one is lost, this call says which, as it ends only when all ranks answer.
///
/// Ranks whose call of the devices has ended already begin the next one meanwhile, by [`agree_on_call`]. So this looks
/// alike: otherwise the ranks would find that their calls differ, and not that a rank is lost. The rank that is lost
/// may have begun its next call, too, so that this round ends well. Then the others make theirs again, and this rank
/// asks again if it still has the hint.
pub(crate) fn ask_all(shared: &Arc<Shared>) -> Arc<Agreement> {
    let agreement = Arc::new(Agreement::default());
    let (told, answered) = (shared.clone(), agreement.clone());
    driving::all_gather_then(&shared.group, ASK.to_vec(), move |heard| {
        if heard.is_ok() {
            answered.tell(Answer::Asked);
        }
        let result = heard.map(drop);
        told.tell(|inbox| inbox.agreed.push(result));
    });
    agreement
}
