//! Constraints on the answers of models that think: the answer is constrained, the thoughts before it are not.

use crate::output::reader::Thoughts;
use crate::tokenize::TokenizedPrompt;

use super::ValidRequest;

impl ValidRequest {
    /// Leaves room for thoughts, now that the prompt tells whether there will be any.
    pub(crate) fn let_think(&mut self, prompts: &[TokenizedPrompt]) {
        let (Some(structure), Some(prompt)) = (&self.structure, prompts.first()) else { return };
        let begun = match self.reply.reading.thoughts(&self.model.tokenizer, &prompt.ids) {
            Thoughts::Begun => true,
            Thoughts::Possible => false,
            Thoughts::None => return,
        };
        match structure.behind_thoughts(begun) {
            Some(structure) => self.structure = Some(structure),
            // The answer begins at once: what stands there is no thought.
            None => self.reply.reading.reasoning = None,
        }
    }
}
