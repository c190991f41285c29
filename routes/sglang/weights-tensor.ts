import { Type } from 'typebox'
import { owe, scopeKey } from '../../src/updates/apply-source.ts'
import type { Routes } from '../../src/http/context.ts'
import { expectUpdate } from '../../src/updates/expect-update.ts'
import { installFormParser } from '../../src/http/upload/form-parser.ts'
import { TENSOR_BODY_LIMIT } from '../../src/http/limits.ts'
import { refusals, tornTensors, WeightsRefusal } from '../../src/http/schemas.ts'
import { entriesOf, tensorIdentity, TensorUpdateBody, updateFromTensor } from '../../src/updates/tensor-update.ts'
import { uploadType } from '../../src/http/upload/upload-types.ts'
import { updateFromUpload, UploadReport } from '../../src/updates/upload-update.ts'
import { Report, toReport } from '../../src/updates/write-report.ts'
import { CallJoiner } from '../../src/weights/call-joiner.ts'

const TensorsUpdated = Type.Object({
  success: Type.Literal(true),
  message: Type.String(),
  torn_count: tornTensors,
  report: Report,
  upload: Type.Optional(UploadReport)
}, {
  title: 'TensorUpdateReply',
  description: 'All bytes are in place on every rank, and the sender may free or reuse its memory.'
})

/** Weights out of the memory of processes on the same machine. */
const tensors: Routes = async (app, { context }) => {
  await installFormParser(app)
  const updates = new CallJoiner<Awaited<ReturnType<typeof updateFromTensor>>>()

  app.post('/update_weights_from_tensor', {
    config: { auth: 'admin', errors: 'weights', uploads: true },
    bodyLimit: TENSOR_BODY_LIMIT,
    // A body with a wrong field shares memory like any other.
    attachValidation: true,
    preParsing: expectUpdate(context),
    schema: {
      operationId: 'updateWeightsFromTensor',
      summary: 'Take new weights from tensors that a torch process shares',
      description:
        "All handles are read and checked before the first byte is written, and given back before the reply, whatever it says. A call equal to one that runs already gets that one's outcome, but for `kept`, which is written once more.",
      tags: ['weights'],
      body: TensorUpdateBody,
      response: { 200: TensorsUpdated, ...refusals(WeightsRefusal) }
    }
  }, async request => {
    if (uploadType(request) !== undefined) {
      const { message, report, torn, upload } = await updateFromUpload(context, request)
      return { success: true as const, message, torn_count: torn, report: toReport(report), upload }
    }
    if (request.validationError !== undefined) {
      await context.tensors.discard(entriesOf(request.body))
      owe(context.engine, request.body, request.validationError.message)
      throw request.validationError
    }
    const update = async (): ReturnType<typeof updateFromTensor> => await updateFromTensor(context, request.body)
    // Texts of handles tell a client's retry; what is kept may hold other bytes by now than the call before read.
    const { message, report, torn } = request.body.kept == null
      ? await updates.join([scopeKey(context.engine, request.body), ...tensorIdentity(request.body)], update)
      : await update()
    return { success: true as const, message, torn_count: torn, report: toReport(report) }
  })
}

export default tensors
